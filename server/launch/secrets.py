"""The secrets of a gateway, given by the operator or made at the first start in the data directory.

The operator gives them in the environment, or in files of `D/secrets` (D: the data directory). A
secret that several gateways share is never made by one of them: another gateway would make its own
and refuse the keys of the first.
"""

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from server.accounts.admin_key import AdminKey
from server.launch.children import write_private
from server.launch.errors import ServeError

_HEX = re.compile(r"[0-9a-fA-F]{64}")


class SecretError(ServeError):
    """A secret that cannot be used; str() names the place, and never the secret."""


class SecretMissing(SecretError):
    def __init__(self, variable: str, path: Path) -> None:
        self.variable, self.path = variable, path
        super().__init__(
            f"There is no {path}, and {variable} is not set. One of them must hold the secret, the "
            "same for all gateways on a database or Redis; `openssl rand -hex 32` makes one."
        )


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets, each 32 bytes in hex.

    pepper: key of the HMAC that API keys are stored as.   receipt_signing_key: for Ed25519.
    """

    pepper: str = field(repr=False)
    receipt_signing_key: str = field(repr=False)

    @classmethod
    def load(cls, data_dir: Path, *, may_make: bool = True) -> "Secrets":
        """Read each secret from CHORALE_<NAME>, else from secrets/<name> in `data_dir`.

        may_make: make a missing secret in that file. Raises SecretError.
        """
        return cls(*(_load_given(data_dir, name, may_make) for name in cls.__slots__))


def _load_given(data_dir: Path, name: str, may_make: bool) -> str:
    variable, path = f"CHORALE_{name.upper()}", data_dir / "secrets" / name
    if given := os.environ.get(variable):
        place, secret = variable, given
    elif may_make or path.exists():
        place, secret = str(path), load_or_create_secret(path)
    else:
        raise SecretMissing(variable, path)
    if not _HEX.fullmatch(secret):
        raise SecretError(
            f"{place} must hold 32 bytes in hex; restore it. `openssl rand -hex 32` makes a new "
            "one, with which what depends on the old one is not valid any more."
        )
    return secret


def load_or_create_secret(path: Path) -> str:
    """The secret in `path`, made with mode 0600 if there is none; all processes get the same one.

    Raises SecretError.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        replace_secret(draft)
        # A link fails where a rename would replace: of two processes that start at once, the second
        # must not overwrite the secret of the first.
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    if not (secret := path.read_text().strip()):
        raise SecretError(f"The secret file {path} is empty.")
    return secret


def load_admin_key(data_dir: Path) -> AdminKey:
    """CHORALE_ADMIN_KEY, or the key in `data_dir`, which is made if missing. Raises SecretError."""
    if given := os.environ.get("CHORALE_ADMIN_KEY"):
        return AdminKey(given)
    path = data_dir / "admin.key"
    is_new = not path.exists()
    return AdminKey(load_or_create_secret(path), path, is_new=is_new)


def replace_secret(path: Path) -> str:
    """Write 32 new random bytes in hex to `path`, atomically and with mode 0600."""
    secret = secrets.token_hex(32)
    write_private(path, f"{secret}\n".encode())
    return secret
