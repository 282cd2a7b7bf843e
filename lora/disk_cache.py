"""Packed adapters on local disk under a byte quota, one file for each digest and form.

    {digest}.{form_id[:16]}.packed    whole, by rename          {random}.draft    being written

Only the fetcher process writes and evicts files; a lock keeps a second fetcher out. The engine's
loader opens and touches files, and unlinks damaged ones. Evicting a file that is being read is
harmless: the reader keeps its open file, and the next load fetches again. Files are not synced: a
file torn by a power loss is recognized by its checksum.
"""

import contextlib
import fcntl
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lora.errors import AdapterError, LoraError
from lora.heap_dict import HeapDict
from registry.errors import NoRoom
from registry.storage.free_space import FreeSpace

_SUFFIX = ".packed"
_DRAFT = ".draft"
_LOCK = ".lock"


def packed_path(root: Path, digest: str, form_id: str) -> Path:
    """Path of an adapter's packed file in the cache under `root`, whether it exists or not."""
    return root / f"{digest}.{form_id[:16]}{_SUFFIX}"


class CacheInUse(LoraError):
    """Another fetcher process has locked the cache folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(f"another fetcher uses the disk cache {root}: give each its own folder")


class DiskCache:
    """Files of at most `quota_bytes` in all under `root`, drafts included.

    The folder is scanned when it is opened, and later changes are counted as they are made; a file
    that another process removed is noticed when it is looked for or is about to be evicted. A
    folder that vanished is made again: all that was in it can be fetched.
    space: of the disk, which the cache shares with others.   Raises CacheInUse.
    """

    def __init__(self, root: Path, quota_bytes: int, space: FreeSpace | None = None) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self._space = space or FreeSpace()
        self._counting = threading.Lock()
        self._drafts: dict[Path, int] = {}  # bytes of each
        with self._counting:
            self._open()
            self._evict_down_to(quota_bytes)

    def close(self) -> None:
        """Release the lock, so that another process can use the folder."""
        self._held.close()

    @property
    def used_bytes(self) -> int:
        return self._kept_bytes + self._draft_bytes

    @property
    def _draft_bytes(self) -> int:
        return sum(list(self._drafts.values()))

    def touch(self, path: Path) -> bool:
        """Mark the file as the most recently used; returns whether it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        with self._counting:
            self._forget(path)
        return False

    @contextlib.contextmanager
    def drafts(self) -> Iterator[list[Path]]:
        """A list for `allocate`; drafts in it that were not kept are deleted at the end.

        Raises CacheInUse.
        """
        with self._counting:
            if not _names(self.root, self._held):
                before = self._held
                self._open()
                before.close()
        drafts: list[Path] = []
        try:
            yield drafts
        finally:
            for path in drafts:
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(path, 0)  # frees the blocks even if a hanging read has it open
                    path.unlink()
            with self._counting:
                for path in drafts:
                    self._drafts.pop(path, None)

    def allocate(self, drafts: list[Path], size_bytes: int) -> Path:
        """Add to `drafts` one of zeros with its disk blocks allocated; files are evicted for it.

        Raises AdapterError: too_large for the quota; unavailable if that is full of downloads, or
        the rest of the disk is for others; OSError.
        """
        if sum(self._drafts[path] for path in drafts) + size_bytes > self.quota_bytes:
            raise AdapterError(
                "too_large", f"it does not fit the disk cache of {self.quota_bytes} bytes"
            )
        path = self.root / f"{uuid.uuid4().hex}{_DRAFT}"
        with contextlib.ExitStack() as held:
            with self._counting:
                self._make_room(size_bytes)
                try:
                    held.enter_context(self._space.promise((self.root, size_bytes)))
                except NoRoom:
                    raise AdapterError("unavailable", "the disk is full") from None
                self._drafts[path] = size_bytes
                drafts.append(path)
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        return path

    def keep(self, draft: Path, path: Path) -> None:
        """Rename a draft, which is complete, to `path`, and count it as kept."""
        with self._counting:
            self._forget(path)
            draft.rename(path)
            self._note(path, path.stat())
            del self._drafts[draft]

    def evict_half(self) -> None:
        """Evict the least recently used half of the files' bytes, since the disk is full."""
        with self._counting:
            self._evict_down_to(self._kept_bytes // 2 + self._draft_bytes)

    # ---- inside, with `_counting` held ----

    def _open(self) -> None:
        """Make the folder if it is missing, lock it, and count what is in it. Raises CacheInUse."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._held = _lock(self.root)
        self._files: HeapDict[Path, tuple[int, int]] = HeapDict()  # (last use seen, bytes)
        self._kept_bytes = 0
        for path in self.root.iterdir():
            if path.suffix == _DRAFT:
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    self._note(path, path.stat())

    def _note(self, path: Path, stat: os.stat_result) -> None:
        self._files[path] = (stat.st_mtime_ns, stat.st_size)
        self._kept_bytes += stat.st_size

    def _forget(self, path: Path) -> None:
        _, size_bytes = self._files.pop(path, (0, 0))
        self._kept_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Evict files to make room. Raises AdapterError."""
        if self._draft_bytes + size_bytes > self.quota_bytes:
            raise AdapterError("unavailable", "the disk cache is full of downloads under way")
        self._evict_down_to(self.quota_bytes - size_bytes)
        missing_bytes = size_bytes - self._space.left_bytes(self.root)
        if 0 < missing_bytes <= self._kept_bytes:
            self._evict_down_to(self.used_bytes - missing_bytes)

    def _evict_down_to(self, size_bytes: int) -> None:
        """Evict until at most `size_bytes` are used, or no file is left to evict."""
        while self.used_bytes > size_bytes and self._files:
            path = self._files.first()
            used_at, _ = self._files[path]
            self._forget(path)
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if stat.st_mtime_ns > used_at:
                    self._note(path, stat)  # the engine has touched it: its turn comes later
                else:
                    path.unlink()


def _names(root: Path, held: BinaryIO) -> bool:
    """Whether the folder is still the one that `held` locks."""
    try:
        return os.path.samestat((root / _LOCK).stat(), os.fstat(held.fileno()))
    except FileNotFoundError:
        return False


def _lock(root: Path) -> BinaryIO:
    """Lock the folder by an open file; the lock ends with this process. Raises CacheInUse."""
    file = (root / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CacheInUse(root) from None
    return file
