"""A disk of a few bytes, which tests pass to a real journal as its disk."""

import errno
import math
import os

from engine.journal.files import Disk
from engine.journal.journal import Journal
from tests.engine.fakes import FakeClock


class Killed(BaseException):
    """Stands for the end of the process."""


class SmallDisk(Disk):
    """A disk that holds one journal's directory.

    capacity: bytes that its files may take in all.
    error: errno of a write that does not fit; the part that fits is written.
    calls_left: calls until the process is killed, in the middle of a write.
    """

    def __init__(self, directory, error=errno.ENOSPC):
        self.directory = directory
        self.error = error
        self.capacity = math.inf
        self.calls_left = math.inf
        self.num_allocations = 0

    @property
    def used(self):
        return sum(entry.stat().st_size for entry in os.scandir(self.directory))

    def fill(self, but=0):
        """Leave room for `but` bytes."""
        self.capacity = self.used + but

    def write(self, file, data, offset):
        self._call(file, data, offset)
        end = os.fstat(file).st_size + max(0, self.capacity - self.used)
        if end <= offset:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(file, data[: int(min(end - offset, len(data)))], offset)

    def allocate(self, file, size_bytes):
        self.num_allocations += 1
        self._call(file, memoryview(b""), 0)
        if size_bytes - os.fstat(file).st_size > self.capacity - self.used:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(file, size_bytes)

    def _call(self, file, data, offset):
        self.calls_left -= 1
        if self.calls_left < 0:
            super().write(file, data[: len(data) // 2], offset)
            raise Killed


def make_journal(directory, disk=None, clock=None, **options):
    """A journal on `disk`, or on a disk that never fills."""
    return Journal(
        directory / "journal", "eng-1", "base-1", clock=clock or FakeClock(), disk=disk, **options
    )
