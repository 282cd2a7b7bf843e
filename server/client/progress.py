"""The progress of an upload, and its watchers."""

import threading
from collections.abc import Mapping
from typing import Literal

Stage = Literal["reading", "waiting", "sending", "checking", "proving"]
"""Stage of an upload.   reading: its files are read for their digests.   waiting: a quota has no
room for another upload.   sending: its files are sent.   checking: the server checks the files.
proving: an engine serves the adapter, to see that it does what its weights say."""


class Watcher:
    """Is told of an upload's progress; this base class ignores it."""

    def enter(self, stage: Stage) -> None: ...

    def sent(self, sent_bytes: int, size_bytes: int) -> None: ...


class Tally:
    """Bytes that the server has or that were sent, by piece. Thread-safe."""

    def __init__(self, size_bytes: int, watcher: Watcher) -> None:
        self._size_bytes = size_bytes
        self._watcher = watcher
        self._pieces: dict[str, int] = {}
        self._lock = threading.Lock()

    def restart(self, pieces: Mapping[str, int]) -> None:
        """Set the counts to the bytes that the server has."""
        with self._lock:
            self._pieces = dict(pieces)
            self._tell()

    def count(self, piece: str, num_bytes: int) -> None:
        with self._lock:
            self._pieces[piece] = num_bytes
            self._tell()

    def _tell(self) -> None:
        self._watcher.sent(sum(self._pieces.values()), self._size_bytes)
