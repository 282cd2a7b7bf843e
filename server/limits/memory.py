"""The limiter of one gateway: its state is this process's own, and survives a clean exit.

A file in the data directory says that a gateway runs, or holds the state after a clean exit. A
gateway that starts and finds in it that a gateway runs knows that the state was lost.

    no file            no gateway has served before: every limit starts with all of its amount
    a running gateway  the gateway was killed: every limit starts empty, and refills within a minute
    a state            limits go on where they were, by the time that passed on this machine's clock
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from registry.whole_files import write_whole
from server.database.clock import now_ms as wall_ms
from server.limits.bucket import WINDOW_MS
from server.limits.calls import Answer, Call
from server.limits.rules import Grant, Limit, RateLimited, Standing
from server.limits.states import Key, State, States


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class _Saved(msgspec.Struct):
    """The state at a clean exit.   wall_ms, at_ms: the time of this machine, and the limiter's."""

    wall_ms: int
    at_ms: int
    born_ms: int
    states: list[tuple[Key, State]]


class MemoryLimiter:
    """All limits, for the only gateway of a database; used by one thread.

    clock: returns integer milliseconds, and never goes back.   wall_clock: that of this machine.
    max_states: limits in use at the same time; a request for one more is refused until one of them
    is idle.   path: of the file; None: nothing is kept.   note_refusal: called with the limit that
    refuses a request.
    """

    def __init__(
        self,
        clock: Callable[[], int] = monotonic_ms,
        *,
        wall_clock: Callable[[], int] = wall_ms,
        max_states: int = 50_000,
        path: Path | None = None,
        note_refusal: Callable[[Limit], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._path = path
        self._note_refusal = note_refusal
        self._states = States(born_ms=clock() - WINDOW_MS, max_states=max_states)

    @property
    def is_degraded(self) -> bool:
        """Whether the limiter lost its state or counts a part only, and may refuse too early."""
        return self._clock() < self._states.born_ms + WINDOW_MS

    async def start(self) -> None:
        """Go on where the last gateway ended; from now on the file says that a gateway runs."""
        if self._path is None:
            return
        with suppress(FileNotFoundError):
            written = self._path.read_bytes()
            self._states.born_ms = self._clock()
            with suppress(msgspec.DecodeError):  # the file of a running gateway holds no state
                saved = msgspec.json.decode(written, type=_Saved)
                passed_ms = max(0, self._wall_clock() - saved.wall_ms)
                clock, ahead_ms = self._clock, saved.at_ms + passed_ms - self._clock()
                self._clock = lambda: clock() + ahead_ms
                self._states.born_ms = saved.born_ms
                self._states.states = dict(saved.states)
        write_whole(self._path, b"{}", sync=True)

    async def run(self) -> None:
        """Return at once, since nothing has to be done meanwhile."""

    async def close(self) -> None:
        """Write the state for the next gateway; nothing may be acquired any more."""
        if self._path:
            states = list(self._states.states.items())
            saved = _Saved(self._wall_clock(), self._clock(), self._states.born_ms, states)
            # After a power cut the file must tell the truth as well.
            write_whole(self._path, msgspec.json.encode(saved), sync=True)

    async def acquire(
        self, request_id: str, limits: Sequence[Limit], *, tokens: int, lifetime_ms: int
    ) -> Grant:
        """Charge one request, its tokens and its seat under every limit, or none under any.

        lifetime_ms: time after which the request cannot be under way any more. Raises RateLimited.
        """
        call = Call("acquire", tuple(limits), tokens, request_id, lifetime_ms)
        answer = await self._pass(call)
        return Grant(
            request_id=request_id,
            limits=call.limits,
            standings=answer.standings,
            is_in_redis=answer.age_ms is not None,
        )

    async def check(self, limits: Sequence[Limit], *, tokens: int = 1) -> None:
        """Check that one request of so many tokens would pass now, without a charge.

        Raises RateLimited.
        """
        await self._pass(Call("check", tuple(limits), tokens))

    async def standings(self, limits: Sequence[Limit]) -> list[Standing]:
        """Each limit as it is now, with its holders."""
        return list((await self._pass(Call("standings", tuple(limits)))).standings)

    def release(self, grant: Grant, used_tokens: int | None) -> None:
        """End a request's charge: refund unused tokens, charge those used beyond, free the seat.

        used_tokens: None if the request never ran; then the request itself is refunded as well. A
        second call does nothing. The method never waits.
        """
        self._states.release(grant, used_tokens, self._clock())

    async def _pass(self, call: Call) -> Answer:
        """Make a call. Raises RateLimited for the limit that takes longest to free."""
        answer = await self._answer(call) if call.limits else Answer()
        if any(answer.waits):
            retry_after_ms = max(answer.waits)
            limit = call.limits[answer.waits.index(retry_after_ms)]
            self._note_refusal(limit)
            raise RateLimited(
                limit,
                retry_after_ms=retry_after_ms,
                standings=answer.standings,
                is_degraded=self.is_degraded,
            )
        return answer

    async def _answer(self, call: Call) -> Answer:
        now_ms, waits = self._clock(), list[int]()
        if call.command == "acquire":
            waits = self._states.acquire(call, now_ms)
        elif call.command == "check":
            waits = self._states.check(call, now_ms)
        with_holders = call.command == "standings"
        standings = self._states.standings(call.limits, now_ms, with_holders=with_holders)
        return Answer(tuple(waits), standings)
