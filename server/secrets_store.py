"""Secrets that are made on the first start and kept beside the data: pepper, admin key."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path


class EmptySecret(Exception):
    """The file is there and holds nothing: using it would be using no secret."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"The secret file {path} is empty.")


def load_or_create_secret(path: Path, make: Callable[[], str] | None = None) -> str:
    """The secret in `path`, made with mode 0600 if there is none; all processes get the same one.

    Raises EmptySecret.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write(draft, (make or _random_secret)())
        # A link, not a rename: of two processes that start at once, the second must not replace.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
    return _load(path)


def _load(path: Path) -> str:
    secret = path.read_text().strip()
    if not secret:
        raise EmptySecret(path)
    return secret


def _write(path: Path, secret: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())


def _random_secret() -> str:
    return secrets.token_hex(32)
