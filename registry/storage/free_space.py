"""Free space on the volumes that uploads, caches and exports write to, and folders to work in.

A volume has a reserve. The ledger (a SQLite file with its WAL) and the engines' journals write into
it, and nothing else does: a volume that is full of uploads ends no request. A process counts the
bytes that it has promised itself; those of other processes count once they are written.
"""

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from registry.errors import NoRoom

MAX_RESERVE_BYTES = 1 << 30
LOW_SHARE = 20
"""Divisor of a volume: with less than a twentieth of it left, somebody should make room."""
SMALL_SHARE = 4
"""Divisor of a small volume: a quarter of it is the reserve, and a quarter is for pending parts."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Volume:
    """A file system. device: its number.   free_bytes: what this user may still write."""

    device: int
    size_bytes: int
    free_bytes: int


def volume_of(folder: Path) -> Volume:
    """The volume that `folder` lies on, or will lie on when it is made."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    unit = found.f_frsize
    return Volume(folder.stat().st_dev, found.f_blocks * unit, found.f_bavail * unit)


class FreeSpace:
    """Promises of space, kept apart by volume. Any thread may call it.

    reserve_bytes: what stays free on a volume; None for 1 GiB, or a quarter of a small volume.
    look: returns a folder's volume as it is now.
    """

    def __init__(
        self, reserve_bytes: int | None = None, look: Callable[[Path], Volume] = volume_of
    ) -> None:
        self.look = look
        self._reserve_bytes = reserve_bytes
        self._promised: Counter[int] = Counter()
        self._changing = threading.Lock()

    @contextmanager
    def promise(self, *asked: tuple[Path | None, int]) -> Iterator[None]:
        """Hold room for the bytes that the block writes to each folder. Raises NoRoom.

        None stands for a place that is no folder of this machine.
        """
        taken = self._take([(folder, size) for folder, size in asked if folder is not None])
        try:
            yield
        finally:
            with self._changing:
                self._promised -= taken  # drops volumes that have no promise left

    def left_bytes(self, folder: Path) -> int:
        """Bytes that can still be promised; negative where the reserve is not all there."""
        with self._changing:
            return self._left_bytes(self.look(folder))

    def is_low(self, folder: Path) -> bool:
        """Whether little can still be promised, for the size of the volume."""
        return self.left_bytes(folder) < self.look(folder).size_bytes / LOW_SHARE

    def _take(self, asked: list[tuple[Path, int]]) -> Counter[int]:
        taken: Counter[int] = Counter()
        with self._changing:
            for folder, size_bytes in asked:
                volume = self.look(folder)
                taken[volume.device] += size_bytes
                if self._left_bytes(volume) < taken[volume.device]:
                    raise NoRoom
            self._promised += taken
        return taken

    def _left_bytes(self, volume: Volume) -> int:
        reserve_bytes = self._reserve_bytes
        if reserve_bytes is None:
            reserve_bytes = min(MAX_RESERVE_BYTES, volume.size_bytes // SMALL_SHARE)
        return volume.free_bytes - self._promised[volume.device] - reserve_bytes


class WorkDir:
    """Gives each job a folder of its own under `path`, and room for what the job writes."""

    def __init__(self, path: Path | None = None, space: FreeSpace | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir())
        self.space = space or FreeSpace()

    @contextmanager
    def folder(
        self, prefix: str, size_bytes: int, *others: tuple[Path | None, int]
    ) -> Iterator[Path]:
        """A new folder, deleted with all that is in it at the end. Raises NoRoom, OSError.

        size_bytes: most bytes that will be in it.   others: what the job writes elsewhere, as
        FreeSpace.promise takes it.
        """
        with self.space.promise((self.path, size_bytes), *others), naming_full():
            # The folder may have been deleted; nothing in it outlives its job.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self.path) as name:
                yield Path(name)


@contextmanager
def naming_full() -> Iterator[None]:
    """Raise NoRoom for the OSError of a full disk, or of a user's quota that is used up."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoRoom from error
        raise
