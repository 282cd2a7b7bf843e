"""What tests of several packages share: a real PostgreSQL server, Triton's interpreter."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from xdist.scheduler import LoadScopeScheduling

from tests import interpreter, needs
from tests.postgres_server import postgres_server
from tests.redis_server import RedisServer, redis_binary

interpreter.use()

_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, but for the test's name: paths of Unix sockets lie in it, and have a limit."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server of this test run's own, on a Unix socket."""
    with postgres_server() as server:
        yield server.get_uri()


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


class _ByFile(LoadScopeScheduling):
    """What one worker keeps to itself: a file; all of e2e.

    Fixtures of a module are made once; stacks of several processes run one at a time.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "e2e" if "/e2e/" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server of this test run's own; whoever breaks it makes one for itself."""
    needs.redis()
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which Redis it was: a test that is skipped for want of one is no proof."""
    terminalreporter.write_line(f"Redis server of the tests: {redis_binary() or 'none'}")
