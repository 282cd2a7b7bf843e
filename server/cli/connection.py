"""How a command reaches the server: its URL, the key, and errors of one line."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.terminal import CommandFailed

if TYPE_CHECKING:
    from server.client.http import Client

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", envvar="CHORALE_URL", help="URL of the server.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="CHORALE_API_KEY", help="API key of a tenant.")
]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-key", envvar="CHORALE_ADMIN_KEY", help="Admin key of the operator."),
]
DataDir = Annotated[
    Path,
    typer.Option(
        envvar="CHORALE_DATA_DIR",
        help="The server's data directory, whose admin.key is used if no admin key is given.",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

DEFAULT_DATA_DIR = Path(".chorale")


def as_tenant(url: str, api_key: str | None, **options: Any) -> "AbstractContextManager[Client]":
    """The API with a tenant's key. Raises CommandFailed, also in place of the client's errors."""
    if not api_key:
        raise CommandFailed("No API key: set CHORALE_API_KEY, or give --api-key.")
    return connect(url, api_key, **options)


def as_operator(
    url: str, admin_key: str | None, data_dir: Path, **options: Any
) -> "AbstractContextManager[Client]":
    """The API with the admin key. Raises CommandFailed, also in place of the client's errors."""
    return connect(url, admin_key or _read_admin_key(data_dir), **options)


@contextmanager
def connect(url: str, key: str, **options: Any) -> "Iterator[Client]":
    """The API with a key.   options: of the client, such as read_timeout_s."""
    from server.client.http import Client, ClientError

    try:
        with Client(url, key, **options) as client:
            yield client
    except ClientError as error:
        raise CommandFailed(str(error)) from error


def _read_admin_key(data_dir: Path) -> str:
    path = data_dir / "admin.key"
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise CommandFailed(
            f"No admin key: set CHORALE_ADMIN_KEY, or give the server's --data-dir "
            f"({path}: {getattr(error, 'strerror', 'it is damaged')})."
        ) from None
