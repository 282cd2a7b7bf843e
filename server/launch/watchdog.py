"""Watches the beats of one child, and says when its loop stands still."""

import os
import sys
import tempfile
import time
from collections.abc import Callable

from engine.wire.silence import Silence
from lora.beat import RECORD, VARIABLE

_MOST_GAP_S = 1.0
"""Silence that counts between two looks, which are usually 0.2 s apart."""


class Watchdog:
    """The memory that a child beats into, and the silence of that child.

    first_beat_s: longest time from now to the first beat; each beat says what may follow it.
    descriptor: file for the child to inherit.
    """

    def __init__(self, first_beat_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.descriptor = _shared_memory()
        os.pwrite(self.descriptor, RECORD.pack(0, first_beat_s, b"starting"), 0)
        self._silence = Silence(first_beat_s, _MOST_GAP_S, clock)
        self._number = 0
        self._what = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that tell the child where to beat."""
        return {VARIABLE: str(self.descriptor)}

    def is_silent(self) -> bool:
        """Look at the child. True if it has been silent for longer than it may."""
        # A record that is just being written may be half new; the next look sees it whole.
        number, self._silence.limit_s, what = RECORD.unpack(
            os.pread(self.descriptor, RECORD.size, 0)
        )
        self._what = what.rstrip(b"\0").decode(errors="replace")
        is_too_long = self._silence.is_too_long()
        if number != self._number:
            self._number = number
            self._silence.end()
            return False
        return is_too_long

    @property
    def complaint(self) -> str:
        """A sentence for the log, without its subject."""
        while_what = f" while {self._what}" if self._what else ""
        return f"has been silent for {self._silence.seconds:.0f} s{while_what}"

    def close(self) -> None:
        os.close(self.descriptor)


def _shared_memory() -> int:
    """A file without a name; on Linux it is on no disk, so that a full disk does not matter."""
    if sys.platform == "linux":
        return os.memfd_create("beat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
