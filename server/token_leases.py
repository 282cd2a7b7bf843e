"""Token leases: more is paid for before the engine has used up what was.

Only tenants with a hard budget have leases that end before their requests do. Hold and lease are
extended together or not at all; the engine never waits, and stops at the last leased token.
"""

import asyncio

from engine.messages import LeaseLow
from server.budgets import extend
from server.clock import now_ms
from server.database import Database, LedgerUnavailable
from server.engines import Engines
from server.running import Running, RunningRequest

_RETRY_WAITS_S = (0.2, 0.5, 1.0)
"""The ledger may be away for a moment; after that the request stops where its lease ends."""


class TokenLeases:
    """Answers the engine's LeaseLow. At most one question a request is under way."""

    def __init__(self, database: Database, running: Running) -> None:
        self._database = database
        self._running = running
        self._asking: dict[str, asyncio.Task[None]] = {}

    def extend_soon(self, engines: Engines, low: LeaseLow) -> None:
        """Never waits; a request that has ended meanwhile gets nothing."""
        if low.request_id not in self._asking:
            task = asyncio.create_task(self._extend(engines, low))
            self._asking[low.request_id] = task
            task.add_done_callback(lambda _: self._asking.pop(low.request_id, None))

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _extend(self, engines: Engines, low: LeaseLow) -> None:
        request = self._running.find(low.request_id)
        if request is None:
            return
        for wait_s in _RETRY_WAITS_S:
            try:
                lease = await self._extend_hold(request)
            except LedgerUnavailable:
                await asyncio.sleep(wait_s)
                continue
            if lease > low.token_lease:
                await engines.extend_lease(low.request_id, lease)
            return

    async def _extend_hold(self, request: RunningRequest) -> int:
        """Completion tokens that it covers now, in all."""
        return await self._database.write(
            lambda conn: extend(
                conn,
                request.request_id,
                request.wanted_tokens,
                num_answers=request.num_answers,
                now_ms=now_ms(),
            ),
            order=request.tenant_id,
        )
