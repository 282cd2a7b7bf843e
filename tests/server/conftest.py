"""An empty migrated database for every test, on SQLite and on a real PostgreSQL."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from server.accounts.auth import SCOPES
from server.accounts.tables import metadata
from server.database.database import DEFAULT_FILE, Database
from tests.server.in_process import InProcess, User
from tests.server.scripted_product import Product, scripted_product


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
    """A function that empties a database and returns its URL; a new one takes 50 times as long."""
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
    """URL of an empty migrated database."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / DEFAULT_FILE)
        return f"sqlite:///{tmp_path / DEFAULT_FILE}"
    return request.getfixturevalue("empty_postgres")()


@pytest.fixture
def each_database(database_url: str, tmp_path: Path) -> Iterator[Database]:
    """Each of both databases, for statements that differ or that PostgreSQL may see otherwise."""
    database = Database(database_url, data_dir=tmp_path)
    yield database
    database.close()


@pytest.fixture
def database(sqlite_database: Database) -> Database:
    """SQLite's, for statements that are the same on both."""
    return sqlite_database


@pytest.fixture
def sqlite_database(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Database]:
    """A SQLite database, for tests that are too slow to run twice or that concern only SQLite."""
    shutil.copy(migrated_sqlite, tmp_path / DEFAULT_FILE)
    database = Database(data_dir=tmp_path)
    yield database
    database.close()


@pytest.fixture
def postgres_database(empty_postgres, tmp_path: Path) -> Iterator[Database]:
    """A PostgreSQL database, for tests that concern only PostgreSQL."""
    database = Database(empty_postgres(), data_dir=tmp_path)
    yield database
    database.close()


@pytest.fixture
def product(migrated_sqlite: Path, tmp_path: Path) -> Iterator[InProcess]:
    """A gateway without a tenant, for one test."""
    with InProcess.running(migrated_sqlite, tmp_path) as product:
        yield product


@pytest.fixture
def scripted(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Product]:
    """A gateway around an engine whose outputs the test scripts, for one test."""
    with scripted_product(migrated_sqlite, tmp_path) as product:
        yield product


@pytest.fixture(scope="module")
def shared_product(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcess]:
    """A gateway for all tests of a file, each of which makes tenants of its own."""
    with InProcess.running(migrated_sqlite, tmp_path_factory.mktemp("product")) as product:
        yield product


@pytest.fixture
def acme(product: InProcess) -> User:
    """A new tenant, with a key of all scopes."""
    return product.user(scopes=SCOPES)
