"""The journal's files: segments, of which the newest is written to, and a reserve for a full disk.

00000000000000000001.journal   named for its first record; whole lines, and perhaps a torn last
part                           a segment that has no name yet
reserve                        room allocated beforehand: the next segment, when there is no other
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


class DiskFull(Exception):
    """Nothing of what was to be written is there; what was there before still is."""


class Disk:
    """The two calls that a full disk fails. They raise OSError."""

    def write(self, file: int, data: memoryview, offset: int) -> int:
        """Bytes written, as os.pwrite."""
        return os.pwrite(file, data, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        """Room for the file's first `size_bytes`, certain from then on."""
        os.posix_fallocate(file, 0, size_bytes)


class JournalFiles:
    """One engine's files in `directory`. All raise OSError where the disk fails in another way.

    segment_bytes: past it, the next append begins a segment.   reserve_bytes: to be allocated.
    """

    def __init__(
        self, directory: Path, *, segment_bytes: int, reserve_bytes: int, disk: Disk
    ) -> None:
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
    def has_segment(self) -> bool:
        return self._path is not None

    @property
    def is_long(self) -> bool:
        """Whether the newest segment is as long as it should get."""
        return self._size_bytes >= self.segment_bytes

    def found(self, path: Path, size_bytes: int, last_before: int) -> None:
        """A segment of an earlier life, newer than any before; what is past `size_bytes` is torn.

        last_before: the last record before it.
        """
        file = os.open(path, os.O_WRONLY)
        os.ftruncate(file, size_bytes)
        self._use(path, file, size_bytes, last_before)

    def append(self, data: bytes, *, sync: bool) -> None:
        """All of `data`, or nothing. sync: it is on disk before this returns. Raises DiskFull."""
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
        """Go on in a new segment that begins with `data`, on disk before it has its name.

        in_reserve: in the room that was allocated for it. Raises DiskFull.
        """
        source = self.directory / ("reserve" if in_reserve else "part")
        path = self.directory / f"{first_seq:020d}.journal"
        with _naming_full():
            file = os.open(source, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                self._write(file, data, 0)
                os.ftruncate(file, len(data))
                os.fdatasync(file)
                if self.has_segment:
                    os.fdatasync(self._file)
                source.rename(path)
                self._sync_directory()
            except OSError:
                os.close(file)
                if not in_reserve:
                    source.unlink(missing_ok=True)
                raise
        self._use(path, file, len(data), first_seq - 1)

    def allocate_reserve(self) -> None:
        """Have the reserve; no change where it is. Raises DiskFull, and has none."""
        with _naming_full():
            file = os.open(self.directory / "reserve", os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                self._disk.allocate(file, self.reserve_bytes)
            except OSError:
                os.ftruncate(file, 0)
                raise
            finally:
                os.close(file)
            self._sync_directory()

    def delete_through(self, seq: int) -> None:
        """Drop the segments that end with `seq` or before; never the newest."""
        while self._older and self._older[0][0] <= seq:
            self._older.popleft()[1].unlink()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _use(self, path: Path, file: int, size_bytes: int, last_before: int) -> None:
        """From now on this is the newest; one of its name had no records, and was replaced."""
        if self._path not in (None, path):
            self._older.append((last_before, self._path))
        self.close()
        self._path, self._file, self._size_bytes = path, file, size_bytes

    def _write(self, file: int, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = self._disk.write(file, rest, offset)
            rest, offset = rest[written:], offset + written

    def _sync_directory(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _naming_full() -> Iterator[None]:
    """OSErrors that mean no room come out as DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(error.strerror) from error
        raise
