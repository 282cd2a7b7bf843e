"""The two files of an adapter on this machine, which an upload declares and reads."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from server.client.http import ClientError
from server.text.json_object import JsonObject

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)

# This file is never read, since a pickle may run code.
PICKLED_FILE = "adapter_model.bin"

_CHUNK_BYTES = 256 << 10
_CONVERT = (
    f"{PICKLED_FILE} is not taken: load it with PEFT and "
    "save_pretrained(folder, safe_serialization=True)"
)


class NotAnAdapter(ClientError):
    """A folder or a repository lacks one of the two files."""

    def __init__(self, where: Path | str, filename: str, *, is_pickled: bool = False) -> None:
        remedy = _CONVERT if is_pickled else "an adapter is a folder as PEFT saves it"
        super().__init__(f"{where} has no {filename}; {remedy}.")


class Unreadable(ClientError):
    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}.")


def is_adapter(folder: Path) -> bool:
    """Whether the folder has at least one of the two files; `check_files` says what is missing."""
    return any((folder / name).is_file() for name in ADAPTER_FILES)


def size_bytes_of(folder: Path) -> int:
    """Bytes of both files together; a missing file counts 0."""
    paths = [folder / name for name in ADAPTER_FILES]
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_files(folder: Path) -> None:
    """Check that both files are there. Raises NotAnAdapter."""
    for filename in ADAPTER_FILES:
        if not (folder / filename).is_file():
            is_pickled = filename == WEIGHTS_FILE and (folder / PICKLED_FILE).is_file()
            raise NotAnAdapter(folder, filename, is_pickled=is_pickled)


def describe(folder: Path) -> dict[str, JsonObject]:
    """Size and sha256 of each file, as an upload declares them. Raises NotAnAdapter, Unreadable."""
    check_files(folder)
    files: dict[str, JsonObject] = {}
    for filename in ADAPTER_FILES:
        path = folder / filename
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                # The size of the hashed bytes, even if the file has changed since.
                size_bytes = file.tell()
        except OSError as error:
            raise Unreadable(path, error) from error
        files[filename] = {"size_bytes": size_bytes, "sha256": sha256}
    return files


def read_part(path: Path, start: int, end: int, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the bytes [start, end) in chunks.   on_read: called with the bytes taken so far.

    Raises Unreadable.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            for at in range(start, end, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, end - at))
                on_read(min(at + _CHUNK_BYTES, end) - start)
    except OSError as error:
        raise Unreadable(path, error) from error
