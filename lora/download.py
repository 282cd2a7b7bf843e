"""Download of an object into a local file: parallel parts, each resumed where it broke.

Faults of a store or a proxy are found here: a body that ends early is requested again from where it
ended, and an object with the wrong length or digest is downloaded once more from the beginning.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lora.errors import DROPPED, AdapterError
from registry.errors import ObjectNotFound, StorageError
from registry.storage.storage import Storage

PART_BYTES = 8 << 20
"""Size of one GET; a smaller object is a single GET."""
PARTS_AT_ONCE = 4
MAX_ATTEMPTS = 6
"""Attempts to read one part, with at most 3.1 s of waiting between them in all."""
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.1, 2.0
_READS_OF_A_DOWNLOAD = 2 * PARTS_AT_ONCE
"""Threads for each download: half of them may be stuck in abandoned reads until those time out."""
_LOOK_S = 0.05
"""Interval at which a download checks whether it was dropped, or is too late."""


class Downloader:
    """Downloads objects of one store, `max_downloads` at once.

    A download that is dropped or too late abandons its hanging reads; they end by the store's own
    read timeout and write no more data.
    """

    def __init__(
        self,
        storage: Storage,
        max_downloads: int = 8,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.sleep = sleep
        max_reads = max_downloads * _READS_OF_A_DOWNLOAD
        self._pool = ThreadPoolExecutor(max_reads, thread_name_prefix="read")

    def download(
        self,
        key: str,
        digest: str,
        size_bytes: int,
        target: Path,
        *,
        timeout_s: float,
        is_dropped: Callable[[], bool],
    ) -> None:
        """Fill `target`, which exists, with the object under `key`.

        Raises AdapterError: missing, corrupt, unavailable, dropped; OSError of the local disk.
        """
        until = self.clock() + timeout_s
        for _ in range(2):  # a proxy may have damaged the first download
            parts = _Parts(key, size_bytes, target, iter(range(0, size_bytes, PART_BYTES)))
            self._read_all(parts, until, is_dropped)
            if not parts.is_wrong and _digest(target) == digest:
                return
        raise AdapterError("corrupt", f"the object is not the {size_bytes} bytes of {digest}")

    def _read_all(self, parts: "_Parts", until: float, is_dropped: Callable[[], bool]) -> None:
        num_readers = min(PARTS_AT_ONCE, -(-parts.size_bytes // PART_BYTES))
        reading = {self._pool.submit(self._read_parts, parts) for _ in range(num_readers)}
        try:
            while reading:
                if is_dropped():
                    raise AdapterError(DROPPED.kind, DROPPED.error)
                if self.clock() >= until:
                    raise AdapterError("unavailable", "the store was too slow")
                done, reading = wait(reading, _LOOK_S, FIRST_EXCEPTION)
                for reader in done:
                    reader.result()
        finally:
            parts.is_over = True

    def _read_parts(self, parts: "_Parts") -> None:
        with parts.target.open("r+b") as file:
            for start in parts.starts:  # of all readers, each of which gets others
                if parts.is_over:
                    return
                self._read_part(parts, start, file)

    def _read_part(self, parts: "_Parts", start: int, file: BinaryIO) -> None:
        """Read the part at `start`: [start, at) is in the file, [at, end) is still to be read."""
        at, end = start, min(start + PART_BYTES, parts.size_bytes)
        file.seek(start)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                # The last part is read without an end, so that an object that is too long shows.
                asked_end = None if end == parts.size_bytes else end
                for chunk in self.storage.read(parts.key, at, asked_end):
                    at += len(chunk)
                    if parts.is_over or at > end:
                        break
                    file.write(chunk)
                if at != end:
                    parts.is_wrong = parts.is_over = True
                return
            except ObjectNotFound as error:
                raise AdapterError("missing", str(error)) from error
            except StorageError as error:
                if attempt == MAX_ATTEMPTS or parts.is_over:
                    raise AdapterError("unavailable", str(error)) from error
            longest_s = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (attempt - 1))
            self.sleep(random.uniform(0, longest_s))


@dataclass(slots=True)
class _Parts:
    """Work left in a download. starts: offsets of the parts that no reader has taken yet.

    is_over: readers must write no more.   is_wrong: the object does not have the expected length.
    """

    key: str
    size_bytes: int
    target: Path
    starts: Iterator[int]
    is_over: bool = False
    is_wrong: bool = False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
