"""Canonical objects on local disk under a byte quota, named by their digest.

The fetcher process writes and evicts (least recently used by mtime); the engine's loader opens and
touches. A file appears by rename, so what is there is whole; its digest is checked again on open.
Unlinking a file that somebody reads is harmless: the reader keeps it, the next one fetches again.
"""

import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from lora.errors import AdapterError

_SUFFIX = ".safetensors"
_CHUNK_BYTES = 1 << 20


class DiskCache:
    """Objects of at most `quota_bytes` in all under `root`."""

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        root.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        return self.root / f"{digest}{_SUFFIX}"

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def open_verified(self, digest: str) -> bytes:
        """The object's bytes. Raises FileNotFoundError; AdapterError if they changed."""
        path = self.path(digest)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            path.unlink(missing_ok=True)
            raise AdapterError("corrupt", f"the object on disk is not {digest}")
        os.utime(path)
        return data

    def store(self, digest: str, chunks: Iterable[bytes], size_bytes: int) -> None:
        """Write an object whole or not at all. Raises AdapterError if it is not `digest`."""
        self._make_room(size_bytes)
        # Two tenants' equal objects may arrive at once: each has a draft of its own.
        temporary = self.root / f"{digest}.{uuid.uuid4().hex}.part"
        hasher, written = hashlib.sha256(), 0
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    written += len(chunk)
                    if written > size_bytes:
                        raise AdapterError(
                            "corrupt", f"the object is larger than {size_bytes} bytes"
                        )
                    hasher.update(chunk)
                    file.write(chunk)
            if hasher.hexdigest() != digest:
                raise AdapterError("corrupt", f"the stored object is not {digest}")
            temporary.rename(self.path(digest))
        finally:
            temporary.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self._objects())

    def _objects(self) -> list[tuple[float, int, Path]]:
        """(mtime, bytes, path) of every object, least recently used first."""
        found = []
        for path in self.root.glob(f"*{_SUFFIX}"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime, stat.st_size, path))
        return sorted(found)

    def _make_room(self, size_bytes: int) -> None:
        objects = self._objects()
        used = sum(size for _, size, _ in objects)
        for _, size, path in objects:
            if used + size_bytes <= self.quota_bytes:
                return
            path.unlink(missing_ok=True)
            used -= size
