"""Object stores: a folder, or a bucket (registry.storage.s3). Keys look like paths.

registry.storage.url opens both kinds.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from registry.errors import ObjectNotFound, StorageError
from registry.storage.faults import StorageFaults
from registry.storage.free_space import naming_full
from registry.whole_files import sync_folder

CHUNK_BYTES = 1 << 20

_KEY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_INCOMING = ".incoming"
_LEFTOVER_S = 24 * 3600.0
"""Age at which an incoming file is deleted, since its process must have been killed."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing. modified_at: its last put, in Unix seconds of the store's clock."""

    key: str
    size_bytes: int
    modified_at: float


class Storage(Protocol):
    """Immutable objects under keys. Every method raises StorageError when the store fails."""

    faults: StorageFaults

    def put(self, key: str, path: Path) -> None:
        """Store the file at `path`, all or nothing; storing the same file again is harmless.

        Raises NoRoom if the store is a folder on a full disk.
        """

    def read(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Read the bytes [start, end) in chunks of at most CHUNK_BYTES.

        Raises ObjectNotFound at the first chunk. A range past the object's end is cut there; a body
        that ends earlier raises StorageError.
        """

    def size(self, key: str) -> int:
        """Size of the object in bytes. Raises ObjectNotFound."""

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is no error."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Objects whose keys start with `prefix`, in the order of their keys."""


@runtime_checkable
class PresignedStorage(Storage, Protocol):
    """A store that takes the parts of an object from any client that has a URL for them."""

    def begin_multipart(self, key: str) -> str:
        """Begin a multipart upload and return its id; the object appears when it is completed."""

    def presign_part(
        self, key: str, multipart_id: str, number: int, size_bytes: int, expires_s: int
    ) -> str:
        """Make a URL that takes part `number` by HTTP PUT, of exactly `size_bytes`.

        number: counts from 1.   size_bytes: at least 5 MiB except for the last part.
        expires_s: seconds for which the URL is valid.
        """

    def list_parts(self, key: str, multipart_id: str) -> dict[int, int]:
        """Bytes of every part that has arrived, by number.

        Raises ObjectNotFound if there is no such multipart upload, as after it was completed or
        aborted.
        """

    def complete_multipart(self, key: str, multipart_id: str) -> None:
        """Make the parts that have arrived the object, in the order of their numbers.

        Raises ObjectNotFound like list_parts, even if an earlier call completed the upload and
        only its answer was lost.
        """

    def abort_multipart(self, key: str, multipart_id: str) -> None:
        """Drop the parts of a multipart upload; a missing upload is no error."""

    def abort_multiparts(self, prefix: str, begun_before: float) -> int:
        """Drop every multipart upload below `prefix` begun before `begun_before`; returns how many.

        begun_before: Unix seconds of the store's clock. A put() that was killed leaves such an
        upload, too.
        """


def folder_of(storage: Storage) -> Path | None:
    """The folder that a store writes to; None for a bucket, which takes no disk of ours."""
    return storage.root if isinstance(storage, LocalStorage) else None


def check_key(key: str) -> None:
    """Raise StorageError unless the key is a plain relative path, without ".." and .incoming."""
    if not _KEY.fullmatch(key) or any(part in (".", "..", _INCOMING) for part in key.split("/")):
        raise StorageError(key=ascii(key), reason="the key is not allowed")


class LocalStorage:
    """Objects as files under one folder. A file appears under its key only when it is on disk."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).resolve()
        self.faults = StorageFaults()
        self._incoming = self.root / _INCOMING
        self._sweep()

    def put(self, key: str, path: Path) -> None:
        target = self._path(key)
        try:
            with naming_full():
                self._incoming.mkdir(parents=True, exist_ok=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._copy_whole(path, target)
        except OSError as error:
            raise self.faults.error(key, str(error)) from error

    def read(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        try:
            with self._path(key).open("rb") as file:
                file.seek(start)
                left = None if end is None else max(0, end - start)
                yield from _chunks(file, left)
        except (FileNotFoundError, IsADirectoryError):
            raise ObjectNotFound(key=key) from None
        except OSError as error:
            raise self.faults.error(key, str(error)) from error

    def size(self, key: str) -> int:
        path = self._path(key)
        try:
            if path.is_file():
                return path.stat().st_size
        except OSError as error:
            raise self.faults.error(key, str(error)) from error
        raise ObjectNotFound(key=key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise self.faults.error(key, str(error)) from error
        # The empty folders of uploads are removed; rmdir refuses a folder that is in use.
        with suppress(OSError):
            for parent in path.parents:
                if parent == self.root:
                    break
                parent.rmdir()

    def list(self, prefix: str) -> Iterator[StoredObject]:
        # Only the prefix's folder is walked, so a listing costs no more than the tenant's objects.
        folder = self.root / prefix.rpartition("/")[0]
        if not folder.resolve().is_relative_to(self.root):
            raise StorageError(key=ascii(prefix), reason="the prefix is not allowed")
        paths = (path for path in folder.rglob("*") if path.is_file())
        keys = (path.relative_to(self.root).as_posix() for path in paths)
        for key in sorted(k for k in keys if k.startswith(prefix) and not k.startswith(_INCOMING)):
            with suppress(FileNotFoundError):  # deleted meanwhile
                stat = (self.root / key).stat()
                yield StoredObject(key, stat.st_size, stat.st_mtime)

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _sweep(self) -> None:
        """Delete files that puts of killed processes left; files of running puts are younger."""
        with suppress(OSError):
            for path in self._incoming.iterdir():
                if path.stat().st_mtime < time.time() - _LEFTOVER_S:
                    path.unlink()

    def _copy_whole(self, source: Path, target: Path) -> None:
        handle, name = tempfile.mkstemp(dir=self._incoming)
        try:
            with os.fdopen(handle, "wb") as copy, source.open("rb") as file:
                for chunk in _chunks(file, None):
                    copy.write(chunk)
                copy.flush()
                os.fsync(copy.fileno())
            self._rename(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    def _rename(self, name: str, target: Path) -> None:
        try:
            os.replace(name, target)
        except FileNotFoundError:
            # Another thread's delete() took the empty folder between our mkdir and here.
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(name, target)


def _chunks(file: BinaryIO, left: int | None) -> Iterator[bytes]:
    while left is None or left > 0:
        chunk = file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
        if not chunk:
            return
        left = None if left is None else left - len(chunk)
        yield chunk
