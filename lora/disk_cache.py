"""Packed adapters on local disk under a byte quota, one file for each digest and form.

    {digest}.{form_id[:16]}.packed    whole, by rename          {random}.draft    being written

The fetcher process alone writes and evicts, and a lock keeps it alone. The engine's loader opens
and touches, and unlinks what is damaged. Evicting what somebody reads is harmless: the reader keeps
it, the next one fetches again. Nothing is synced: after a power loss a torn file shows by its
checksum.
"""

import contextlib
import fcntl
import heapq
import io
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lora.errors import AdapterError, LoraError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_SUFFIX = ".packed"
_DRAFT = ".draft"
_LOCK = ".lock"
_PREVIOUS_SUFFIXES = (".safetensors", ".part")
"""Of canonical objects and their drafts, which version 0.1 kept here."""


def packed_path(root: Path, digest: str, form_id: str) -> Path:
    """Where an adapter lies in the cache under `root`, if it does."""
    return root / f"{digest}.{form_id[:16]}{_SUFFIX}"


class CacheInUse(LoraError):
    """Another process writes to this folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(f"another fetcher uses {root}")


class DiskCache:
    """Files of at most `quota_bytes` in all under `root`, drafts included.

    What is there is counted once, at the start, and from then on by what is done; a file that
    somebody else removed is noticed when it is looked for or would be evicted.
    Raises CacheInUse.
    """

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        root.mkdir(parents=True, exist_ok=True)
        self._held = _lock(root)
        self._counting = threading.Lock()
        self._reserved_bytes = 0
        self._files: dict[Path, tuple[int, int]] = {}  # (last use seen, bytes)
        self._kept_bytes = 0
        self._by_use: list[tuple[int, Path]] = []  # a heap; valid where it agrees with `_files`
        self._scan()
        with self._counting:
            self._evict_down_to(quota_bytes)

    def close(self) -> None:
        """Let another process have the folder."""
        self._held.close()

    @property
    def used_bytes(self) -> int:
        return self._kept_bytes + self._reserved_bytes

    def touch(self, path: Path) -> bool:
        """Whether the file is there; it is the most recently used then."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        with self._counting:
            self._forget(path)
        return False

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator["Room"]:
        """Room for drafts, which are gone at the end unless kept. Raises AdapterError."""
        room = Room(self)
        try:
            room.grow(size_bytes)
            yield room
        finally:
            room.clear()

    def evict_half(self) -> None:
        """The least recently used files: the disk is full, whatever the quota says."""
        with self._counting:
            self._evict_down_to(self._kept_bytes // 2 + self._reserved_bytes)

    # ---- for Room ----

    def take(self, size_bytes: int) -> None:
        """Count bytes as reserved, after evicting what must go for them. Raises AdapterError."""
        with self._counting:
            if self._reserved_bytes + size_bytes > self.quota_bytes:
                raise AdapterError("unavailable", "the disk cache is full of what is on its way")
            self._evict_down_to(self.quota_bytes - size_bytes)
            self._reserved_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._counting:
            self._reserved_bytes -= size_bytes

    def keep(self, draft: Path, path: Path) -> int:
        """Make a draft the file at `path`: no more reserved, but kept. Its bytes."""
        with self._counting:
            self._forget(path)
            draft.rename(path)
            stat = path.stat()
            self._note(path, stat)
            self._reserved_bytes -= stat.st_size
        return stat.st_size

    # ---- inside, with `_counting` held ----

    def _scan(self) -> None:
        for path in self.root.iterdir():
            if path.suffix in (_DRAFT, *_PREVIOUS_SUFFIXES):
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    self._note(path, path.stat())

    def _note(self, path: Path, stat: os.stat_result) -> None:
        self._files[path] = (stat.st_mtime_ns, stat.st_size)
        self._kept_bytes += stat.st_size
        heapq.heappush(self._by_use, (stat.st_mtime_ns, path))

    def _forget(self, path: Path) -> None:
        _, size_bytes = self._files.pop(path, (0, 0))
        self._kept_bytes -= size_bytes

    def _evict_down_to(self, size_bytes: int) -> None:
        """Evict until at most so much is used, or nothing is left to evict."""
        while self.used_bytes > size_bytes and self._by_use:
            used_at, path = heapq.heappop(self._by_use)
            if self._files.get(path, (None, 0))[0] != used_at:
                continue  # noted again since
            self._forget(path)
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if stat.st_mtime_ns > used_at:
                    self._note(path, stat)  # the engine has touched it: its turn comes later
                else:
                    path.unlink()


class Room:
    """Bytes reserved in a disk cache, and the drafts that fill them."""

    def __init__(self, cache: DiskCache) -> None:
        self.cache = cache
        self.size_bytes = 0
        self._drafts: list[Path] = []

    def grow(self, size_bytes: int) -> None:
        """Reserve more. Raises AdapterError: too_large, unavailable."""
        if self.size_bytes + size_bytes > self.cache.quota_bytes:
            raise AdapterError(
                "too_large", f"it does not fit a disk cache of {self.cache.quota_bytes} bytes"
            )
        self.cache.take(size_bytes)
        self.size_bytes += size_bytes

    def allocate(self, size_bytes: int) -> Path:
        """A draft of zeros that has its blocks already: a full disk shows now, as OSError."""
        path = self._new()
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        return path

    @contextlib.contextmanager
    def write(self) -> Iterator[tuple[Path, "GrowingFile"]]:
        """An empty draft that reserves as it grows."""
        path = self._new()
        with GrowingFile(path, self) as file:
            yield path, file

    def keep(self, draft: Path, path: Path) -> None:
        """The draft is whole: it is the file at `path` from now on."""
        self.size_bytes -= self.cache.keep(draft, path)

    def clear(self) -> None:
        """Remove what was not kept, then give its room back."""
        for path in self._drafts:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, 0)  # a read that hangs may have it open for a while
                path.unlink()
        self.cache.give_back(self.size_bytes)
        self.size_bytes = 0

    def _new(self) -> Path:
        self._drafts.append(self.cache.root / f"{uuid.uuid4().hex}{_DRAFT}")
        return self._drafts[-1]


class GrowingFile(io.FileIO):
    """A new file whose every byte is reserved before it is written."""

    def __init__(self, path: Path, room: Room) -> None:
        super().__init__(path, "x+b")
        self._room = room
        self._reserved_bytes = 0

    def write(self, data: "ReadableBuffer") -> int:
        view = memoryview(data).cast("B")
        end = self.tell() + len(view)
        if end > self._reserved_bytes:
            self._room.grow(end - self._reserved_bytes)
            self._reserved_bytes = end
        written = 0
        while written < len(view):  # a raw file may take less at a time
            written += super().write(view[written:])
        return written


def _lock(root: Path) -> BinaryIO:
    """An open file whose lock dies with this process."""
    file = (root / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CacheInUse(root) from None
    return file
