"""Log files of a supervisor's children, each kept to a limit.

A child holds its file open in append mode, so a file is cut in place; its newest lines stay.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from registry.storage.free_space import FreeSpace

MAX_LOG_BYTES = 16 << 20
_FULL_BYTES = 64 << 10
"""Limit of a file while the disk has only its reserve left."""
_KEPT_SHARE = 4
"""Divisor of the limit: a file beyond it is cut to a quarter, so that cuts are rare."""


class LogFiles:
    """The files NAME.log of one folder, which is made again if it was deleted.

    space: of the disk; its reserve is not for logs.
    """

    def __init__(
        self, folder: Path, space: FreeSpace | None = None, max_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._folder = folder
        self._space = space or FreeSpace()
        self._max_bytes = max_bytes

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def open(self, name: str) -> BinaryIO:
        """Open a file for a child to append to."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.path(name).open("ab")

    def tend(self) -> None:
        """Cut the files that are too long. What is written at the same moment may be lost."""
        # No process ends because of its log: the next call tries again.
        with suppress(OSError):
            is_full = self._space.left_bytes(self._folder) <= 0
            limit_bytes = min(self._max_bytes, _FULL_BYTES) if is_full else self._max_bytes
            for path in self._folder.glob("*.log"):
                if path.stat().st_size > limit_bytes:
                    _cut(path, limit_bytes // _KEPT_SHARE)


def _cut(path: Path, kept_bytes: int) -> None:
    """Cut a file to the whole lines among its last bytes."""
    with path.open("r+b") as file:
        file.seek(-kept_bytes - 1, os.SEEK_END)
        file.readline()  # the rest of a line, or the end of the one before
        kept = file.read(kept_bytes)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(kept)
