"""The two files of an adapter on this machine, as they are declared and read for an upload."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from server.client.http import ClientError
from server.text.json_object import JsonObject

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)

# Never read: what is in it may run code.
PICKLED_FILE = "adapter_model.bin"

_CHUNK_BYTES = 256 << 10
_CONVERT = (
    f"{PICKLED_FILE} is not taken: load it with PEFT and "
    "save_pretrained(folder, safe_serialization=True)"
)


class NotAnAdapter(ClientError):
    """A folder, or a repository, without the two files."""

    def __init__(self, where: Path | str, filename: str, *, is_pickled: bool = False) -> None:
        remedy = _CONVERT if is_pickled else "an adapter is a folder as PEFT saves it"
        super().__init__(f"{where} has no {filename}; {remedy}.")


class Unreadable(ClientError):
    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}.")


def is_adapter(folder: Path) -> bool:
    """Whether it is meant as one; `check_files` says what is missing."""
    return any((folder / name).is_file() for name in ADAPTER_FILES)


def size_bytes_of(folder: Path) -> int:
    """Of both files, as far as they are there."""
    paths = [folder / name for name in ADAPTER_FILES]
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_files(folder: Path) -> None:
    """Raises NotAnAdapter."""
    for filename in ADAPTER_FILES:
        if not (folder / filename).is_file():
            is_pickled = filename == WEIGHTS_FILE and (folder / PICKLED_FILE).is_file()
            raise NotAnAdapter(folder, filename, is_pickled=is_pickled)


def describe(folder: Path) -> dict[str, JsonObject]:
    """Size and sha256 of both, as an upload declares them. Raises NotAnAdapter, Unreadable."""
    check_files(folder)
    files: dict[str, JsonObject] = {}
    for filename in ADAPTER_FILES:
        path = folder / filename
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                # Of what was hashed, whatever became of the file since.
                size_bytes = file.tell()
        except OSError as error:
            raise Unreadable(path, error) from error
        files[filename] = {"size_bytes": size_bytes, "sha256": sha256}
    return files


def read_part(path: Path, start: int, end: int, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes [start, end), a chunk at a time. on_read: told how many were taken so far."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            for at in range(start, end, _CHUNK_BYTES):
                yield file.read(min(_CHUNK_BYTES, end - at))
                on_read(min(at + _CHUNK_BYTES, end) - start)
    except OSError as error:
        raise Unreadable(path, error) from error
