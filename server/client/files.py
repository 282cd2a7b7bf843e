"""The files of an adapter on this machine, which an upload declares and reads."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from server.client.http import ClientError
from server.text.json_object import JsonObject

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SENT_FILES = (*ADAPTER_FILES, *TOKENIZER_FILES)
"""Files of an upload, in the order in which they are sent; the tokenizer's may be missing."""

_CHUNK_BYTES = 256 << 10


class NotAnAdapter(ClientError):
    """A folder or a repository lacks a file.   is_partial: it has the other one of PEFT's two."""

    def __init__(self, where: Path | str, filename: str, *, is_partial: bool = False) -> None:
        self.is_partial = is_partial
        super().__init__(f"{where} has no {filename}; an adapter is a folder as PEFT saves it.")


class Unreadable(ClientError):
    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}.")


def sent_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that an upload of the folder sends."""
    return tuple(name for name in SENT_FILES if name in ADAPTER_FILES or (folder / name).is_file())


def size_bytes_of(folder: Path) -> int:
    """Bytes of the files that an upload sends. Raises FileNotFoundError."""
    return sum((folder / filename).stat().st_size for filename in sent_files(folder))


def describe(folder: Path) -> dict[str, JsonObject]:
    """Size and sha256 of each file, as an upload declares them. Raises Unreadable."""
    files: dict[str, JsonObject] = {}
    for filename in sent_files(folder):
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
