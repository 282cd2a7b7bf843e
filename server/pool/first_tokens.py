"""How long requests waited for their first token lately; the autoscaler reads it."""

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0
_MAX_WAITS = 10_000


class FirstTokens:
    """The waits of the last half minute; only the newest 10,000 of them are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MAX_WAITS)

    def note(self, waited_s: float) -> None:
        self._waits.append((self._clock(), waited_s))

    def percentile_s(self, share: float) -> float | None:
        """The shortest wait that this share of the waits did not exceed; None without waits."""
        oldest = self._clock() - WINDOW_S
        while self._waits and self._waits[0][0] < oldest:
            self._waits.popleft()
        if not self._waits:
            return None
        waits = sorted(wait for _, wait in self._waits)
        return waits[max(0, math.ceil(share * len(waits)) - 1)]
