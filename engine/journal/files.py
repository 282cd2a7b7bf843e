"""The journal's files: segments, of which the newest is written to, and a reserve for a full disk.

00000000000000000001.journal   named for its first record; whole lines, and perhaps a torn last one
part                           a segment that has no name yet
reserve                        space allocated beforehand: the next segment when the disk is full
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.whole_files import sync_folder

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class DiskFull(Exception):
    """A write found no room: nothing of it is in the file, and what was there before still is."""


class JournalGone(Exception):
    """The journal of an engine was deleted: it is not begun anew, since it is part of the bill."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        super().__init__(
            f"The journal {directory} is gone. Put it back; or remove {directory.parent} (requests "
            "that it had not settled are free then), and start again."
        )


class Disk:
    """The two system calls that fail on a full disk. They raise OSError."""

    def write(self, file: int, data: memoryview, offset: int) -> int:
        """Write data, and return how many bytes were written, as os.pwrite does."""
        return os.pwrite(file, data, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        """Allocate space for the file's first `size_bytes`, certain from then on."""
        os.posix_fallocate(file, 0, size_bytes)


class JournalFiles:
    """One engine's journal files in `directory`.

    segment_bytes: size at which a segment is long.   reserve_bytes: size of the reserve.
    Methods that write raise OSError if the disk fails in another way than being full.
    """

    def __init__(self, directory: Path, segment_bytes: int, reserve_bytes: int, disk: Disk) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.reserve_bytes = reserve_bytes
        self._disk = disk
        self._older: deque[tuple[int, Path]] = deque()  # (last record, file), oldest first
        self._path: Path | None = None
        self._file = -1
        self._size_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def is_long(self) -> bool:
        """Whether the newest segment is so long that the next record should begin another."""
        return self._size_bytes >= self.segment_bytes

    def found(self, path: Path, size_bytes: int, last_before: int) -> None:
        """Take over a segment of an earlier run, newer than any taken over before.

        size_bytes: its whole lines; a torn line behind them is cut off.
        last_before: number of the last record before the segment.
        """
        file = os.open(path, os.O_WRONLY)
        os.ftruncate(file, size_bytes)
        self._use(path, file, size_bytes, last_before)

    def append(self, data: bytes, *, sync: bool) -> None:
        """Append all of `data`, or nothing. sync: return once it is on disk.

        Raises DiskFull, and with sync JournalGone.
        """
        if sync and not os.fstat(self._file).st_nlink:
            raise JournalGone(self.directory)  # A restarted engine would not find the file.
        with _naming_full():
            try:
                self._write(self._file, data, self._size_bytes)
                if sync:
                    os.fdatasync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size_bytes)
                raise
        self._size_bytes += len(data)

    def begin(self, first_seq: int, data: bytes, *, in_reserve: bool = False) -> None:
        """Begin a new segment with `data`, which is on disk before the file gets its name.

        in_reserve: use the space that was allocated beforehand. Raises DiskFull.
        """
        source = self.directory / ("reserve" if in_reserve else "part")
        path = self.directory / f"{first_seq:020d}.journal"
        with _naming_full():
            file = os.open(source, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                self._write(file, data, 0)
                os.ftruncate(file, len(data))
                os.fdatasync(file)
                if self._path:
                    os.fdatasync(self._file)
                source.rename(path)
                sync_folder(self.directory)
            except OSError:
                os.close(file)
                if not in_reserve:
                    source.unlink(missing_ok=True)
                raise
        self._use(path, file, len(data), first_seq - 1)

    def allocate_reserve(self) -> None:
        """Allocate the reserve, or keep the existing one. On DiskFull there is no reserve."""
        with _naming_full():
            file = os.open(self.directory / "reserve", os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                self._disk.allocate(file, self.reserve_bytes)
            except OSError:
                os.ftruncate(file, 0)
                raise
            finally:
                os.close(file)
            sync_folder(self.directory)

    def delete_through(self, seq: int) -> None:
        """Delete the segments that end with `seq` or before; never the newest."""
        while self._older and self._older[0][0] <= seq:
            self._older.popleft()[1].unlink()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _use(self, path: Path, file: int, size_bytes: int, last_before: int) -> None:
        """Make this segment the newest. One of its name had only a checkpoint, and was replaced."""
        if self._path not in (None, path):
            self._older.append((last_before, self._path))
        self.close()
        self._path, self._file, self._size_bytes = path, file, size_bytes

    def _write(self, file: int, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = self._disk.write(file, rest, offset)
            rest, offset = rest[written:], offset + written


@contextmanager
def _naming_full() -> Iterator[None]:
    """Raise DiskFull for an OSError in _NO_ROOM: no space, no quota, or an I/O error."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(error.strerror) from error
        raise
