"""The limiter of one gateway: its state is this process's own, and survives a clean exit.

A file in the data directory says that a gateway runs, or holds the state after a clean exit. A
gateway that starts and finds in it that a gateway runs knows that the state was lost.

    no file            no gateway has served before: every limit starts with all of its amount
    a running gateway  the gateway was killed: every limit starts empty, and refills within a minute
    a state            limits go on where they were, by the time that passed on this machine's clock
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from registry.whole_files import write_whole
from server.database.clock import now_ms as wall_ms
from server.limits.bucket import WINDOW_MS
from server.limits.calls import Answer, Call
from server.limits.rules import Grant, Limit, RateLimited, Standing
from server.limits.states import States


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class MemoryLimiter:
    """All limits, for the only gateway of a database; used by one thread.

    clock: returns integer milliseconds, and never goes back.   max_states: limits in use at the
    same time; a request for one more is refused until one of them is idle.   path: of the file;
    None: nothing is kept.   note_refusal: called with the limit that refuses a request.
    """

    def __init__(
        self,
        clock: Callable[[], int] = monotonic_ms,
        *,
        max_states: int = 50_000,
        path: Path | None = None,
        note_refusal: Callable[[Limit], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._path = path
        self._note_refusal = note_refusal
        self._max_states = max_states
        self._states = States(born_ms=clock() - WINDOW_MS, max_states=max_states)

    @property
    def is_degraded(self) -> bool:
        """Whether the limiter lost its state or counts a part only, and may refuse too early."""
        return self._clock() < self._states.born_ms + WINDOW_MS

    async def start(self) -> None:
        """Get ready; called before anything else."""
        if self._path:
            self.load(self._path)

    async def run(self) -> None:
        """Return at once, since nothing has to be done meanwhile."""

    async def close(self) -> None:
        """Stop; called after everything else."""
        if self._path:
            self.save(self._path)

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
            tokens=tokens,
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
        return self._count(call, call.limits)

    def _count(self, call: Call, limits: Sequence[Limit]) -> Answer:
        """Do a call under `limits`: the call's own, or the same ones with other amounts."""
        now_ms, tokens, waits = self._clock(), call.tokens or 0, list[int]()
        if call.command == "acquire":
            waits = self._states.acquire(call.request_id, limits, tokens, call.lifetime_ms, now_ms)
        elif call.command == "check":
            waits = self._states.check(limits, tokens, now_ms)
        with_holders = call.command == "standings"
        return Answer(
            tuple(waits), self._states.standings(limits, now_ms, with_holders=with_holders)
        )

    def load(self, path: Path, *, wall_now_ms: int | None = None) -> None:
        """Go on where the last gateway ended; from now on the file says that a gateway runs."""
        now_ms = self._clock()
        saved = _read(path)
        if saved is not None:
            self._states = States(born_ms=now_ms, max_states=self._max_states)
            if saved:
                since_ms = max(0, (wall_now_ms or wall_ms()) - saved["wall_ms"])
                shift_ms = now_ms - since_ms - saved["now_ms"]
                self._states.born_ms = saved["born_ms"] + shift_ms
                self._states.unpack(saved["states"], shift_ms)
        write_whole(path, b"{}", sync=True)

    def save(self, path: Path, *, wall_now_ms: int | None = None) -> None:
        """Write the state for the next gateway; nothing may be acquired any more."""
        saved = {
            "wall_ms": wall_now_ms or wall_ms(),
            "now_ms": self._clock(),
            "born_ms": self._states.born_ms,
            "states": self._states.pack(),
        }
        # After a power cut the file must tell the truth as well.
        write_whole(path, json.dumps(saved).encode(), sync=True)


def _read(path: Path) -> dict[str, Any] | None:
    """The saved state; {} if a gateway ran and saved none; None if no gateway ever ran."""
    try:
        saved = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return saved if isinstance(saved, dict) else {}
