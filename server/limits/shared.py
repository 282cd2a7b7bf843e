"""The limiter of several gateways: in Redis while it answers, else each counts a share by itself.

    Redis answers late or not at all  ->  the next epoch is `local`: shares, all of them empty
    Redis has lost its state          ->  the next epoch is `redis` again, empty
    Redis answers again, three times  ->  the next epoch is `redis`, empty

The database holds the current epoch (`epochs`), so that no two ways of counting are in use.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from server.database.clock import now_ms
from server.database.database import LedgerUnavailable
from server.limits.bucket import WINDOW_MS
from server.limits.epochs import Epoch, Epochs, Mode
from server.limits.local_share import LocalShare
from server.limits.memory import monotonic_ms
from server.limits.redis_calls import StateUnavailable
from server.limits.redis_states import (
    Answer,
    Call,
    CarryNeeded,
    RedisStates,
    StateLost,
    acquire_call,
    check_call,
    leave_call,
    release_call,
    standings_call,
)
from server.limits.rules import Grant, Limit, RateLimited, Standing
from server.limits.states import raise_if_limited

logger = logging.getLogger(__name__)

_MAX_EPOCHS = 3
"""How often one request is charged anew because the way of counting changed; then it is refused."""
_MAX_RELEASES = 10_000
"""Most releases that wait for Redis. A charge whose release finds no room expires by itself, so
requests may be refused too early, but never too late.
"""
_NUM_RELEASERS = 4
_PROBE_S = 1.0
_NUM_PROBES = 3
"""Probes in a row that Redis has to answer before it counts again."""
_BEATS_EVERY = 2
_RETRY_S = 0.1
_CLOSE_S = 1.0


class SharedLimiter:
    """The limiter of one gateway of several.

    name: the installation's, so that several installations may share a Redis.
    max_lifetime_ms: longest lifetime of any request.   note_refusal: as in MemoryLimiter.
    """

    def __init__(
        self,
        name: str,
        redis: RedisStates,
        epochs: Epochs,
        *,
        max_lifetime_ms: int,
        clock: Callable[[], int] = monotonic_ms,
        wall_ms: Callable[[], int] = now_ms,
        max_states: int = 50_000,
        note_refusal: Callable[[Limit], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._redis = redis
        self._epochs = epochs
        self._max_lifetime_ms = max_lifetime_ms
        self._clock = clock
        self._wall_ms = wall_ms
        self._max_states = max_states
        self._note_refusal = note_refusal
        self._moving = asyncio.Lock()
        self._share: tuple[int, LocalShare] | None = None
        self._degraded_until_ms = 0
        self._num_probes = 0
        self._releases: asyncio.Queue[tuple[int, Grant, int | None]] = asyncio.Queue(_MAX_RELEASES)

    @property
    def is_degraded(self) -> bool:
        epoch = self._epochs.current
        if epoch is None or epoch.mode == "local" or self._clock() < self._degraded_until_ms:
            return True
        # Before Redis' first answer to this gateway, only the row tells how old the epoch is.
        is_young = self._wall_ms() < epoch.since_ms + WINDOW_MS
        return epoch.number > 1 and is_young

    async def start(self) -> None:
        """Join the current epoch or begin one. Raises LedgerUnavailable."""
        await self._epochs.beat()
        if self._epochs.current is None:
            await self._begin(1, "redis")
        elif self._epochs.current.mode == "local" and not self._epochs.is_counted:
            await self._leave(self._epochs.current, "local")

    async def run(self) -> None:
        """Do heartbeats, probes and releases until cancelled."""
        releasers = [asyncio.create_task(self._release_all()) for _ in range(_NUM_RELEASERS)]
        try:
            turn = 0
            while True:
                await asyncio.sleep(_PROBE_S)
                turn += 1
                with contextlib.suppress(LedgerUnavailable):
                    if turn % _BEATS_EVERY == 0:
                        await self._epochs.beat()
                    await self.probe()
        finally:
            for releaser in releasers:
                releaser.cancel()
            await asyncio.gather(*releasers, return_exceptions=True)

    async def close(self) -> None:
        """Do the waiting releases, for _CLOSE_S at most, and leave; called after `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        with contextlib.suppress(LedgerUnavailable):
            await self._epochs.end()
        await self._redis.close()

    async def acquire(
        self, request_id: str, limits: Sequence[Limit], *, tokens: int, lifetime_ms: int
    ) -> Grant:
        """Charge a request. Raises RateLimited, LedgerUnavailable if no epoch can be written."""
        assert lifetime_ms <= self._max_lifetime_ms
        call = acquire_call(request_id, limits, tokens, lifetime_ms, self._max_lifetime_ms)
        epoch, standings = await self._pass(call)
        return Grant(
            request_id=request_id,
            limits=tuple(limits),
            tokens=tokens,
            epoch=epoch,
            standings=standings,
        )

    async def check(self, limits: Sequence[Limit], *, tokens: int = 1) -> None:
        await self._pass(check_call(limits, tokens))

    async def standings(self, limits: Sequence[Limit]) -> list[Standing]:
        return list((await self._pass(standings_call(limits)))[1])

    def release(self, grant: Grant, used_tokens: int | None) -> None:
        epoch = self._epochs.current
        if grant.epoch is None or epoch is None:
            return
        if epoch.mode == "local":
            self._release_here(epoch, grant, used_tokens)
            return
        with contextlib.suppress(asyncio.QueueFull):
            until_ms = self._clock() + self._max_lifetime_ms
            self._releases.put_nowait((until_ms, grant, used_tokens))

    async def refresh(self) -> None:
        await self._epochs.refresh()

    async def probe(self) -> None:
        """Look whether Redis answers and may count again; called once a second."""
        epoch = self._epochs.current
        if epoch is None or epoch.mode == "redis":
            self._num_probes = 0
            return
        try:
            await self._redis.ping()
        except StateUnavailable:
            self._num_probes = 0
            return
        self._num_probes += 1
        if self._num_probes >= _NUM_PROBES:
            await self._leave(epoch, "redis")

    async def flush(self) -> None:
        """Do all waiting releases."""
        while not self._releases.empty():
            await self._release_next()

    async def _pass(self, call: Call) -> tuple[int | None, tuple[Standing, ...]]:
        """Make a call. Returns the epoch it passed in and its limits' standings.

        Raises RateLimited.
        """
        if not call.limits:
            return None, ()
        for _ in range(_MAX_EPOCHS):
            epoch = await self._usable()
            answer = await self._ask(epoch, call)
            if isinstance(answer, CarryNeeded):
                carried = await self._epochs.carried(answer.limits)
                answer = await self._ask(epoch, replace(call, carried=carried))
            if isinstance(answer, Answer):
                waits, standings, note = answer.waits, answer.standings, self._note_refusal
                raise_if_limited(call.limits, waits, standings, note, is_degraded=self.is_degraded)
                return epoch.number, standings
        raise RateLimited(call.limits[0], retry_after_ms=1000, standings=(), is_degraded=True)

    async def _ask(self, epoch: Epoch, call: Call) -> Answer | CarryNeeded | None:
        """Make a call in an epoch. Returns None if the epoch is over."""
        if epoch.mode == "local":
            return self._local(epoch).run(call, self._clock())
        try:
            answer = await self._redis.run(self._prefix(epoch), call)
        except StateUnavailable:
            await self._leave(epoch, "local")
            return None
        except StateLost:
            await self._leave(epoch, "redis")
            return None
        if isinstance(answer, Answer):
            # Rates begin empty and are full after a window. Carried seats last longer, for as long
            # as a request may, but most are of requests that run: such seats are no degradation.
            self._degraded_until_ms = self._clock() + WINDOW_MS - answer.age_ms
        return answer

    async def _usable(self) -> Epoch:
        """The current epoch, with this gateway among those that count in it."""
        epoch = self._epochs.current
        assert epoch is not None
        if epoch.mode == "local" and not self._epochs.is_counted:
            await self._leave(epoch, "local")
            epoch = self._epochs.current
            assert epoch is not None
        return epoch

    async def _leave(self, epoch: Epoch, mode: Mode) -> None:
        """Write the epoch after `epoch`, unless another one is current by now.

        One call of this gateway does so at a time.
        """
        async with self._moving:
            if self._epochs.current == epoch:
                logger.warning("limits: epoch %d is over, the next is %s", epoch.number, mode)
                await self._begin(epoch.number + 1, mode)

    async def _begin(self, number: int, mode: Mode) -> None:
        self._num_probes = 0
        since_ms = await self._epochs.now_ms()
        epoch = Epoch(number, mode, 1, since_ms)
        if mode == "redis":
            try:
                await self._redis.begin(self._prefix(epoch), is_first=number == 1)
            except StateUnavailable:
                epoch = replace(epoch, mode="local")
        await self._epochs.begin(epoch)

    def _prefix(self, epoch: Epoch) -> str:
        # The name is in braces, so that Redis keeps all keys in one slot.
        return f"chorale:{{{self._name}}}:{epoch.number}.{epoch.since_ms}"

    def _local(self, epoch: Epoch) -> LocalShare:
        if self._share is None or self._share[0] != epoch.number:
            share = LocalShare(
                epoch.num_gateways,
                born_ms=self._clock(),
                carry_ms=self._max_lifetime_ms,
                max_states=self._max_states,
            )
            self._share = epoch.number, share
        return self._share[1]

    def _release_here(self, epoch: Epoch, grant: Grant, used_tokens: int | None) -> None:
        if grant.epoch == epoch.number:
            self._local(epoch).release(grant, used_tokens, self._clock())
        else:
            self._local(epoch).leave(grant)

    def _release_call(self, epoch: Epoch, grant: Grant, used_tokens: int | None) -> Call:
        if grant.epoch == epoch.number:
            return release_call(grant, used_tokens, self._max_lifetime_ms)
        return leave_call(grant, self._max_lifetime_ms)

    async def _release_next(self) -> None:
        """Do the oldest waiting release, with retries until its grant has expired."""
        until_ms, grant, used_tokens = await self._releases.get()
        while self._clock() < until_ms:
            epoch = self._epochs.current
            assert epoch is not None
            if epoch.mode == "local":
                self._release_here(epoch, grant, used_tokens)
                return
            try:
                await self._redis.run(
                    self._prefix(epoch), self._release_call(epoch, grant, used_tokens)
                )
                return
            except StateLost:
                return
            except StateUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def _release_all(self) -> None:
        while True:
            await self._release_next()
