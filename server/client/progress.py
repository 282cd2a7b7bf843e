"""The progress of an upload."""

import threading
from collections.abc import Mapping
from typing import Literal

Stage = Literal["reading", "waiting", "sending", "checking", "proving"]
"""Stage of an upload.   reading: its files are read for their digests.   waiting: a quota has no
room for another upload.   sending: its files are sent.   checking: the server checks the files.
proving: an engine serves the adapter, to see that it does what its weights say."""


class Watcher:
    """Is told of an upload's progress, by several threads; a subclass shows it."""

    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}
        self._lock = threading.Lock()

    def enter(self, stage: Stage) -> None: ...

    def sent(self, sent_bytes: int) -> None:
        """Take the bytes of this upload that the server has or that were sent to it."""

    def restart(self, pieces: Mapping[str, int]) -> None:
        """Set the bytes of each piece to those that the server has."""
        with self._lock:
            self._pieces = dict(pieces)
            self.sent(sum(self._pieces.values()))

    def count(self, piece: str, num_bytes: int) -> None:
        with self._lock:
            self._pieces[piece] = num_bytes
            self.sent(sum(self._pieces.values()))
