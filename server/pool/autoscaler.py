"""How many engines a pool needs: more as soon as requests wait, fewer once they certainly suffice.

Up: when requests have waited for a seat for seconds, or first tokens come later than they should.
The pool grows at once to as many engines as have seats for all present requests; where seats are
not what is short, by one engine, and by the next only when that one has served for as long as the
figures look back.
Down: one engine at a time, after minutes in which one engine fewer would have had room to spare. A
number of engines that was too small for a number of requests is remembered, so that a constant load
finds its number of engines and keeps it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.pool.first_tokens import WINDOW_S

if TYPE_CHECKING:
    from server.pool.engines import EngineFigures

WAIT_S = 3.0
"""How long a queue must last before the pool grows; a shorter one is noise."""
SPARE_S = 300.0
SPARE_SHARE = 0.6
"""Share of the requests that one engine fewer can serve; up to it there is room to spare."""
SLO_SHARE = 0.9
"""Share of first tokens that should come in time."""
_FEW_SLABS = 0.05
"""Share of an arena's slabs; with fewer free, waiting requests may be waiting for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Figures of the engines that take requests, at one moment.

    num_requests: requests that run or wait.   num_waiting: those that wait for a seat or for room
    in the arena; a request that waits for its adapter alone would wait at any engine.
    seats: requests that one engine can run at once.
    first_token_s: seconds within which 9 of 10 first tokens came lately; None if none came.
    """

    num_ready: int
    num_requests: int
    num_waiting: int
    seats: int
    first_token_s: float | None = None


class Autoscaler:
    """Chooses a number of engines between `least` and `most`, beginning with `wanted`.

    All times are `now_s`, of one clock.
    slo_first_token_s: seconds within which 9 of 10 first tokens should come.
    reason: why the number last changed, for the operator.
    """

    def __init__(self, *, least: int, most: int, wanted: int, slo_first_token_s: float) -> None:
        self._least = least
        self._most = most
        self._slo_first_token_s = slo_first_token_s
        self.wanted = min(max(wanted, least), most)
        self.reason = "this gateway began with so many"
        self._too_many: dict[int, int] = {}
        self._complete_since: float | None = None
        self._waiting_since: float | None = None
        self._spare_since: float | None = None

    def decide(self, now_s: float, figures: PoolFigures) -> int:
        """How many engines there should be from now on."""
        if not figures.num_ready:  # without an engine the demand is unknown
            self._complete_since = self._waiting_since = self._spare_since = None
            return self.wanted
        is_complete = figures.num_ready >= self.wanted
        self._complete_since = _since(self._complete_since, is_complete, now_s)
        self._waiting_since = _since(self._waiting_since, figures.num_waiting > 0, now_s)
        shortage = self._shortage(now_s, figures)
        has_spare = is_complete and self._has_spare(figures)
        self._spare_since = _since(self._spare_since, has_spare, now_s)
        if shortage:
            self._grow(now_s, figures, shortage)
        elif _lasts_s(self._spare_since, now_s) >= SPARE_S:
            self.wanted -= 1
            self.reason = f"one engine fewer has had room to spare for {SPARE_S:.0f} s"
            self._spare_since = None
        return self.wanted

    def _shortage(self, now_s: float, figures: PoolFigures) -> str:
        """Say what the engines are too few for; "" if they suffice."""
        if _lasts_s(self._waiting_since, now_s) >= WAIT_S:
            return f"requests wait for a seat, {figures.num_waiting} at last count"
        first_token_s = figures.first_token_s or 0.0
        # Where every request has an engine to itself, another engine would have nothing to do.
        if first_token_s > self._slo_first_token_s and figures.num_requests > figures.num_ready:
            return f"first tokens come late, after {first_token_s:.1f} s"
        return ""

    def _grow(self, now_s: float, figures: PoolFigures, shortage: str) -> None:
        before = self.wanted
        needed = math.ceil(figures.num_requests / figures.seats)
        # The effect of an engine that has just come, or is starting, has to be seen first.
        is_known = _lasts_s(self._complete_since, now_s) >= WINDOW_S
        if needed <= self.wanted and is_known:
            self._too_many[self.wanted] = figures.num_requests
            needed = self.wanted + 1
        self.wanted = min(max(self.wanted, needed), self._most)
        if self.wanted > before:
            self.reason = shortage

    def _has_spare(self, figures: PoolFigures) -> bool:
        fewer = self.wanted - 1
        too_many = [n for number, n in self._too_many.items() if number >= fewer]
        enough_for = min([fewer * figures.seats, *too_many])
        return fewer >= self._least and figures.num_requests <= SPARE_SHARE * enough_for


def pool_figures(
    engines: "Sequence[EngineFigures]", first_token_s: float | None = None
) -> PoolFigures:
    """The figures of those engines that take requests."""
    num_ready = num_requests = num_waiting = seats = 0
    for engine in engines:
        stats, welcome = engine.stats, engine.welcome
        if engine.state != "ready" or stats is None or welcome is None:
            continue
        num_here = stats.running + stats.waiting
        has_room = stats.free_slabs + stats.prefix_slabs >= _FEW_SLABS * stats.total_slabs
        num_ready += 1
        num_requests += num_here
        num_waiting += 0 if has_room and num_here <= welcome.max_num_seqs else stats.waiting
        seats = max(seats, welcome.max_num_seqs)
    return PoolFigures(
        num_ready=num_ready,
        num_requests=num_requests,
        num_waiting=num_waiting,
        seats=max(seats, 1),
        first_token_s=first_token_s,
    )


def _since(before: float | None, is_so: bool, now_s: float) -> float | None:
    """The time since which `is_so` has been true; None if it is false."""
    if not is_so:
        return None
    return now_s if before is None else before


def _lasts_s(since: float | None, now_s: float) -> float:
    return -1.0 if since is None else now_s - since
