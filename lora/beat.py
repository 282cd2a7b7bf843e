"""Signs of life: a process's own loop writes beats, and its supervisor counts the silence.

A beat is one record in memory that both share, so that it needs no disk and waits for nothing. The
loop itself writes it, since a thread beside a loop that stands still would go on beating.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RECORD = struct.Struct("<Qd80s")
"""Number of the beat, longest silence that may follow it in seconds, and what the loop does."""
VARIABLE = "BEAT_DESCRIPTOR"
"""Environment variable with the file descriptor that a watched process inherits."""
SILENCE_S = 10.0
_INTERVAL_S = 1.0


class Beat:
    """Writes beats, at most one a second, besides those that announce long work and its end.

    descriptor: file with room for a record; None: nobody watches.
    silence_s: longest silence of the loop when it has announced nothing.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._descriptor = descriptor
        self._silence_s = silence_s
        self._interval_s = min(_INTERVAL_S, silence_s / 10)
        self._clock = clock
        self._number = 0
        self._due_at = 0.0

    @classmethod
    def inherited(cls, silence_s: float = SILENCE_S) -> "Beat":
        """The beat to the supervisor that started this process, if it watches."""
        # Processes that this one starts do not inherit the file, and must not look for it.
        descriptor = os.environ.pop(VARIABLE, None)
        return cls(None if descriptor is None else int(descriptor), silence_s)

    def beat(self) -> None:
        """Say that the loop is alive; called in each of its turns."""
        if self._clock() >= self._due_at:
            self._write(self._silence_s, "")

    @contextmanager
    def busy(self, what: str, limit_s: float) -> Iterator[None]:
        """Announce work during which the loop may be silent for up to `limit_s`."""
        if limit_s <= self._silence_s:
            yield
            return
        self._write(limit_s, what)
        try:
            yield
        finally:
            self._write(self._silence_s, "")

    def _write(self, limit_s: float, what: str) -> None:
        if self._descriptor is None:
            return
        self._number += 1
        self._due_at = self._clock() + self._interval_s
        os.pwrite(self._descriptor, RECORD.pack(self._number, limit_s, what.encode()), 0)
