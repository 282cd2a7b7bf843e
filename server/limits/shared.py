"""The limiter of several gateways: in Redis while it answers, else each counts its part by itself.

    Redis answers late or not at all     this gateway counts its part, from this call on
    Redis answers three beats in a row   this gateway counts in Redis again
    Redis has lost its counts            every rate starts there as if it were just used up

The gateways do not agree on the moment. So each of these events may let requests pass a limit, but
no more than its amount.

A gateway keeps the states of its own requests also while Redis counts them. So what is left of its
part is that part, less what its requests hold and have used in the last minute; and a request that
began before Redis died frees its seat here as well.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from server.limits.bucket import WINDOW_MS
from server.limits.calls import Answer, Call
from server.limits.memory import MemoryLimiter, monotonic_ms
from server.limits.redis_calls import RedisCalls, StateUnavailable
from server.limits.rules import Grant, Limit

logger = logging.getLogger(__name__)

_MAX_RELEASES = 10_000
"""Most releases that wait for Redis. A charge whose release finds no room expires by itself."""
_NUM_RELEASERS = 4
_BEAT_S = 1.0
_ALIVE_MS = 10_000
"""Milliseconds without a beat after which a gateway is no longer one of those that share limits."""
_NUM_BEATS = 3
"""Beats in a row that Redis has to answer before it counts again."""
_CLOSE_S = 1.0


class SharedLimiter(MemoryLimiter):
    """The limiter of one gateway of several, with the states of its own requests.

    name: the installation's, so that several installations may share a Redis.
    place: of this gateway, from 0, and the number of gateways, until Redis tells of all of them.
    note_refusal: as in MemoryLimiter.
    """

    def __init__(
        self,
        name: str,
        redis: RedisCalls,
        gateway_id: str,
        *,
        place: tuple[int, int],
        clock: Callable[[], int] = monotonic_ms,
        note_refusal: Callable[[Limit], None] = lambda _: None,
    ) -> None:
        super().__init__(clock, note_refusal=note_refusal)
        # The name is in braces, so that Redis keeps all keys in one slot.
        self._prefix = f"chorale:{{{name}}}"
        self._redis = redis
        self._gateway_id = gateway_id
        self._place = place
        self._redis_counts = asyncio.Event()
        self._num_beats = 0
        self._has_counted = False
        self._degraded_until_ms = 0
        self._releases: asyncio.Queue[Call] = asyncio.Queue(_MAX_RELEASES)

    @property
    def is_degraded(self) -> bool:
        return not self._redis_counts.is_set() or self._clock() < self._degraded_until_ms

    async def start(self) -> None:
        self._redis_counts.set()
        await self.beat()

    async def run(self) -> None:
        """Do beats and releases until cancelled."""
        releasers = [asyncio.create_task(self._release_all()) for _ in range(_NUM_RELEASERS)]
        try:
            while True:
                await asyncio.sleep(_BEAT_S)
                await self.beat()
        finally:
            for releaser in releasers:
                releaser.cancel()
            await asyncio.gather(*releasers, return_exceptions=True)

    async def close(self) -> None:
        """Do the waiting releases, for _CLOSE_S at most; called after `run`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        await self._redis.close()

    def release(self, grant: Grant, used_tokens: int | None) -> None:
        super().release(grant, used_tokens)
        if grant.is_in_redis:
            self._release_soon(Call("release", grant.limits, used_tokens, grant.request_id))

    async def beat(self) -> None:
        """Tell Redis that this gateway is there, and learn of the others; called once a second."""
        keys = [f"{self._prefix}:born", f"{self._prefix}:gateways"]
        has_counted, name = int(self._has_counted), self._gateway_id
        arguments: list[str | int] = ["beat", "", name, _ALIVE_MS, has_counted]
        try:
            age_ms, members = await self._redis.evaluate(keys, arguments, is_patient=True)
        except StateUnavailable:
            self._count_here()
            return
        self._note_age(age_ms)
        names = sorted(member.decode() for member in members)
        self._place = names.index(self._gateway_id), len(names)
        self._num_beats += 1
        if self._num_beats >= _NUM_BEATS and not self._redis_counts.is_set():
            logger.warning("limits: Redis answers again and counts them")
            self._redis_counts.set()

    async def flush(self) -> None:
        """Do all waiting releases, if Redis answers."""
        while self._redis_counts.is_set() and not self._releases.empty():
            await self._release_next()

    async def _answer(self, call: Call) -> Answer:
        answer = await self._ask(call) if self._redis_counts.is_set() else None
        if answer is None:
            answer = await super()._answer(self._part(call))
            each = zip(call.limits, answer.standings, strict=True)
            return replace(answer, standings=tuple(replace(it, limit=limit) for limit, it in each))
        if call.command == "acquire" and not any(answer.waits):
            self._states.note(self._part(call), self._clock())
        return answer

    async def _ask(self, call: Call) -> Answer | None:
        """Make a call of Redis; None if it does not answer, and then it counts no longer."""
        arguments = call.arguments(has_counted=self._has_counted)
        try:
            reply = await self._redis.evaluate(call.keys(self._prefix), arguments)
        except StateUnavailable:
            self._count_here()
            if call.command == "acquire":
                # Redis may have charged the request, which counts here only from now on.
                self._release_soon(replace(call, command="release", tokens=None))
            return None
        self._note_age(reply[0])
        return call.read(reply)

    def _part(self, call: Call) -> Call:
        """The call under this gateway's part of each limit; all parts add up to the whole."""
        place, number = self._place
        parts = (
            replace(it, amount=it.amount * (place + 1) // number - it.amount * place // number)
            for it in call.limits
        )
        return replace(call, limits=tuple(parts))

    def _count_here(self) -> None:
        self._num_beats = 0
        if self._redis_counts.is_set():
            logger.warning("limits: Redis does not answer, so this gateway counts its part")
            self._redis_counts.clear()

    def _note_age(self, age_ms: int) -> None:
        self._has_counted = True
        # Rates begin as if they were used up, and are full after a window.
        self._degraded_until_ms = self._clock() + WINDOW_MS - age_ms

    def _release_soon(self, call: Call) -> None:
        with suppress(asyncio.QueueFull):
            self._releases.put_nowait(call)

    async def _release_next(self) -> None:
        """Do the oldest waiting release, once Redis answers."""
        call, answer = await self._releases.get(), None
        while answer is None:
            await self._redis_counts.wait()
            answer = await self._ask(call)

    async def _release_all(self) -> None:
        while True:
            await self._release_next()
