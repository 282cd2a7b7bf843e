"""The operator's key: from the environment, or from a file that may be replaced meanwhile."""

import hmac
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 1.0
"""Least seconds between reads of the file; after them a new key is valid and the old one is not."""


class AdminKey:
    """The key.   path: its file; None if the environment gave it.   is_new: if it was just made."""

    def __init__(
        self,
        key: str,
        path: Path | None = None,
        *,
        is_new: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.path = path
        self.is_new = is_new
        self._monotonic = monotonic
        self._looked_at_s = monotonic()
        self._version = self._version_now()

    def is_it(self, presented: str) -> bool:
        """Whether `presented` is the key, compared in a time that tells nothing about the key."""
        return hmac.compare_digest(presented.encode(), self.current().encode())

    def current(self) -> str:
        """The key, as its file has it now."""
        if self._monotonic() - self._looked_at_s >= _LOOK_S:
            self._look()
        return self.key

    def _look(self) -> None:
        """Take the key that the file holds now; while it is missing or empty the last key stays."""
        self._looked_at_s = self._monotonic()
        version = self._version_now()
        if self.path is None or version is None or version == self._version:
            return
        if key := self.path.read_text().strip():
            self.key, self._version = key, version

    def _version_now(self) -> tuple[int, int] | None:
        """A value that changes when the file is replaced or written; None without a file."""
        try:
            found = self.path and self.path.stat()
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns) if found else None
