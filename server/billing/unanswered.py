"""Requests whose answer is not complete, in a file that outlives a killed gateway."""

import logging
import os
from pathlib import Path

from registry.whole_files import write_whole

logger = logging.getLogger(__name__)

_MAX_LINES = 50_000
"""Lines, 2 MB of them, at which the file is written anew without the requests that are answered."""


class Unanswered:
    """The requests of one gateway. Nothing is synced: the file survives its process, which is what
    it is for, and in a crash of the machine it may lose the newest lines.

    left: requests whose answer the gateway before this one did not complete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch(0o600)
        # A last line without an end was cut off, and says nothing.
        lines, _, torn = path.read_text().rpartition("\n")
        os.truncate(path, path.stat().st_size - len(torn))
        self._ids = _read(lines)
        self.left = tuple(self._ids)
        self._num_lines = 0
        self._is_writable = True

    def add(self, request_id: str) -> None:
        self._ids[request_id] = None
        self._append(f"+{request_id}\n")

    def remove(self, request_id: str) -> None:
        if request_id in self._ids:
            del self._ids[request_id]
            self._append(f"-{request_id}\n")

    def _append(self, line: str) -> None:
        """Write a line. On a full disk requests are served without, and billed as they end."""
        self._num_lines += 1
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())
            if self._num_lines > _MAX_LINES + 2 * len(self._ids):
                self._renew()
        except OSError as error:
            if self._is_writable:
                logger.warning("%s cannot be written: %s", self._path.name, error)
            self._is_writable = False
        else:
            self._is_writable = True

    def _renew(self) -> None:
        """Replace the file by one with the current requests alone. Raises OSError."""
        write_whole(self._path, "".join(f"+{request_id}\n" for request_id in self._ids).encode())
        self._num_lines = len(self._ids)


def _read(lines: str) -> dict[str, None]:
    ids: dict[str, None] = {}
    for line in lines.splitlines():
        if line.startswith("+"):
            ids[line[1:]] = None
        else:
            ids.pop(line[1:], None)
    return ids
