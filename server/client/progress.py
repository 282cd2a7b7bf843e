"""How far an upload is, for whoever watches it."""

import threading
from collections.abc import Mapping
from typing import Literal

Stage = Literal["reading", "waiting", "sending", "checking", "proving"]
"""reading: its files, for their digests.   waiting: for room for another upload.   proving: an
engine serves it, to see that it does what its weights say."""


class Watcher:
    """Is told; this one does not care."""

    def enter(self, stage: Stage) -> None: ...

    def sent(self, sent_bytes: int, size_bytes: int) -> None: ...


class Tally:
    """Bytes that have arrived or are on their way, by piece. Several threads may count."""

    def __init__(self, size_bytes: int, watcher: Watcher) -> None:
        self._size_bytes = size_bytes
        self._watcher = watcher
        self._pieces: dict[str, int] = {}
        self._lock = threading.Lock()

    def restart(self, pieces: Mapping[str, int]) -> None:
        """From what the server says it has."""
        with self._lock:
            self._pieces = dict(pieces)
            self._tell()

    def count(self, piece: str, num_bytes: int) -> None:
        with self._lock:
            self._pieces[piece] = num_bytes
            self._tell()

    def _tell(self) -> None:
        self._watcher.sent(sum(self._pieces.values()), self._size_bytes)
