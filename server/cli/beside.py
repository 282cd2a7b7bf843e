"""The database of a gateway, opened on the gateway's machine, where the gateway may be running."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.terminal import CommandFailed
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.database.database import Database

STATEMENT_TIMEOUT_S = 600.0
"""Time limit of one SQL statement: commands may be slow. A gateway's own statements have 5 s."""

ServerDir = Annotated[
    Path,
    typer.Option(
        envvar="CHORALE_DATA_DIR",
        help="The server's data directory: its settings, its database, its engines' journals.",
    ),
]
DatabaseUrl = Annotated[
    str | None, typer.Option(help="URL of the database, by default that of the data directory.")
]


@contextmanager
def open_beside(data_dir: Path, url: str | None) -> "Iterator[Database]":
    """Open `url`, or the database that `chorale serve` uses. Raises CommandFailed without one."""
    from sqlalchemy.exc import DBAPIError

    from server.database.config import DatabaseConfig
    from server.database.database import DEFAULT_FILE, Database, DatabaseError

    url = url or gateway_settings(data_dir).get("database_url")
    file = data_dir / DEFAULT_FILE
    if url is None and not file.exists():
        raise CommandFailed(f"There is no {file}; give --data-dir or --database-url.", exit_code=2)
    config = DatabaseConfig(statement_timeout_s=STATEMENT_TIMEOUT_S)
    try:
        database = Database(url, data_dir=data_dir, exclusive=False, config=config)
        with closing(database):
            yield database
    except DatabaseError as error:
        raise CommandFailed(str(error)) from error
    except DBAPIError as error:
        # One cause is the database of another release, which has other tables.
        reason = str(error.orig).strip().partition("\n")[0]
        raise CommandFailed(f"{database.url.database}: {reason}.") from error


def gateway_settings(data_dir: Path) -> JsonObject:
    """Settings that the last gateway was started with; empty before the first start.

    Raises CommandFailed.
    """
    path = data_dir / "gateway.json"
    try:
        return dict(json.loads(path.read_text())["settings"]) if path.exists() else {}
    except (ValueError, LookupError, TypeError):
        raise CommandFailed(f"{path} is damaged: `chorale serve` writes it at its start.") from None
