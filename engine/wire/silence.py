"""How long a peer has been silent, in time that the listener itself was awake."""

import time
from collections.abc import Callable


class Silence:
    """Counts a peer's silence from look to look.

    limit_s: silence after which the peer counts as hung.
    most_gap_s: most seconds that count between two looks. After a longer gap it was the listener
    that stood still: its machine slept, it was stopped itself, or it got no processor.
    """

    def __init__(
        self, limit_s: float, most_gap_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = limit_s
        self.seconds = 0.0
        self._most_gap_s = most_gap_s
        self._clock = clock
        self._looked_at = clock()

    def end(self) -> None:
        """Note that something was heard."""
        self.seconds = 0.0

    def is_too_long(self) -> bool:
        """Look, and count the time since the last look."""
        now = self._clock()
        self.seconds += min(max(0.0, now - self._looked_at), self._most_gap_s)
        self._looked_at = now
        return self.seconds > self.limit_s
