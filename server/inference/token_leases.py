"""Token leases: more tokens are paid for before the engine has used up the paid ones.

Only tenants with a hard budget have leases that end before their requests do. Hold and lease are
extended together or not at all. An answer waits a moment at its last leased token, since others of
its tenant may give back what they held, and then it ends there.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.wire.messages import LeaseLow
from server.billing.budgets import extend
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable
from server.pool.engines import Engine
from server.pool.running import Running, RunningRequest

_RETRY_WAITS_S = (0.2, 0.5, 1.0)
"""Waits between tries to extend a lease, the last one again and again while the request runs."""


@dataclass(slots=True, eq=False)
class TokenLeases:
    """Answers the LeaseLow of a base model's engines, with one extension a request at most."""

    database: Database
    running: Running
    retry_waits_s: Sequence[float] = _RETRY_WAITS_S
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def extend_soon(self, engine: Engine, low: LeaseLow) -> None:
        """Extend a lease at the engine that said `low`, without waiting for it; a request that has
        ended gets nothing.
        """
        if low.request_id not in self._asking:
            task = asyncio.create_task(self._extend(engine, low))
            self._asking[low.request_id] = task
            task.add_done_callback(lambda _: self._asking.pop(low.request_id, None))

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _extend(self, engine: Engine, low: LeaseLow) -> None:
        waits_s = self.retry_waits_s
        for wait_s in itertools.chain(waits_s, itertools.repeat(waits_s[-1])):
            request = self.running.find(low.request_id)
            if request is None:
                return
            lease = 0
            with contextlib.suppress(LedgerUnavailable):
                lease = await self._extend_hold(request)
            if lease > low.token_lease:
                await engine.extend_lease(low.request_id, lease)
                return
            # Others hold what is left, the ledger is away, or somebody has locked the hold's row.
            await asyncio.sleep(wait_s)

    async def _extend_hold(self, request: RunningRequest) -> int:
        """Completion tokens that the hold covers now, in all; 0 if it could not be extended."""
        return await self.database.write(
            lambda conn: extend(
                conn,
                request.request_id,
                request.wanted_tokens,
                num_answers=request.num_answers,
                now_ms=now_ms(),
            ),
            order=request.tenant_id,
        )
