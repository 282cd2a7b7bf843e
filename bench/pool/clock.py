"""A clock whose time jumps from one event to the next."""

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Runs events by their times; events of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        assert time_s >= self.now_s, "the past"
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, event)

    def run(self) -> None:
        """Run all events, until none is left."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
