"""A gateway without HTTP, limits and billing: it routes, prefetches, generates, and takes times."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import AddRequest, EngineStats, RequestOutput
from server.pool.engine_pool import EnginePool
from server.pool.files import Member
from server.pool.running import Running, RunningRequest

_READY_S = 120.0
_FRESH_S = 10.0
_LOOK_S = 0.02

Choose = Callable[[AddRequest], str]
"""Chooses an engine for a request and returns the engine's name."""


@dataclass(frozen=True, slots=True)
class Due:
    at_s: float
    request: AddRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """An answered request. at_s: when it was due.   ttft_s: time from then to its first token.
    engine: name of the engine.
    """

    at_s: float
    ttft_s: float
    engine: str


class PoolClient:
    """A client of all engines in `members`.

    The run is over as soon as a request ends other than by its length.
    """

    def __init__(self, members: Sequence[Member], base_revision: str) -> None:
        self._names = [member.name for member in members]
        self._running = Running()
        self._engines = EnginePool(
            lambda: members,
            "",
            base_revision,
            self._running,
            on_end=lambda: None,
            on_lease_low=lambda _: None,
        )

    async def start(self) -> None:
        await self._engines.start()
        until = time.monotonic() + _READY_S
        while len(self._engines.welcomes) < len(self._names):
            if time.monotonic() > until:
                raise SystemExit("the engines did not start; their logs say why")
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        await self._engines.close()

    def chooser(self, policy: str, seed: int) -> Choose:
        """Return the way to choose engines. policy: "product" or "random"."""
        if policy == "product":
            return self._engines.route
        stream = random.Random(seed)
        return lambda _: stream.choice(self._names)

    async def send(self, requests: Sequence[Due], choose: Choose) -> list[Answered]:
        """Send each request when it is due, however many are still under way."""
        start_s = time.perf_counter()
        return await asyncio.gather(*(self._answer(due, choose, start_s) for due in requests))

    async def fresh_stats(self) -> dict[str, EngineStats]:
        """Wait for figures that engines make from now on; return them by engine."""
        old = self._stats()
        until = time.monotonic() + _FRESH_S
        while any(stats is old.get(name) for name, stats in self._stats().items()):
            if time.monotonic() > until:
                raise SystemExit("an engine sent no figures in time")
            await asyncio.sleep(_LOOK_S)
        return self._stats()

    def _stats(self) -> dict[str, EngineStats]:
        return {one.name: one.stats for one in self._engines.figures() if one.stats}

    async def _answer(self, due: Due, choose: Choose, start_s: float) -> Answered:
        await asyncio.sleep(start_s + due.at_s - time.perf_counter())
        message = due.request
        name = choose(message)
        request = RunningRequest(
            request_id=message.request_id,
            tenant_id=message.tenant_id,
            num_answers=1,
            wanted_tokens=message.token_lease,
            is_cold=False,
            engine=name,
        )
        self._running.add(request)
        first_s: float | None = None

        def note(output: RequestOutput) -> None:
            nonlocal first_s
            if output.new_token_ids and first_s is None:
                first_s = time.perf_counter() - start_s
            if output.is_last and output.finish_reason != "length":
                raise RuntimeError(f"a request failed: {output.stop_cause} {output.error}")

        try:
            assert message.adapter
            await self._engines.prefetch(message.tenant_id, message.adapter, name)
            await self._engines.generate(message, name, note)
        finally:
            self._running.remove(request)
        assert first_s is not None
        return Answered(due.at_s, first_s - due.at_s, name)
