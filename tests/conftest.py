"""Fixtures of several packages: a real PostgreSQL server, a Redis server, Triton's interpreter."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from xdist.scheduler import LoadScopeScheduling

from tests import interpreter, needs
from tests.order import is_fast, scope_of, seconds
from tests.postgres_server import postgres_server
from tests.redis_server import RedisServer, redis_binary
from tests.timings import Timings

interpreter.use()
# The tests do not see the settings of the user who runs them.
for _name in [name for name in os.environ if name.startswith("CHORALE_")]:
    del os.environ[_name]

# Settings of the user who runs the tests are none of theirs, nor of the processes that they start.
for _name in [name for name in os.environ if name.startswith("CHORALE_")]:
    del os.environ[_name]

_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder as pytest does, with a short name: it holds Unix sockets, which limit paths."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Name the event loop that runs tests which are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_url(may_start_servers: None) -> Iterator[str]:
    """URL of this test run's own PostgreSQL server, on a Unix socket."""
    with postgres_server() as server:
        yield server.get_uri()


@pytest.fixture(scope="session")
def make_postgres(postgres_url: str) -> Iterator[Callable[[str], str]]:
    """Yield a function that makes a database from a template and returns its URL."""
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


class _LongestFirst(LoadScopeScheduling):
    """Gives a free worker the scope that takes longest, so that all workers end together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda scope: seconds(self.workqueue[scope]))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _LongestFirst:
    return _LongestFirst(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Timings(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only short tests that start no servers")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Return True to leave a file or folder out; None leaves the decision to other hooks."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if config.getoption("--fast") and not is_fast(path) else None


@pytest.fixture(scope="session")
def may_start_servers(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--fast"):
        pytest.skip("--fast starts no servers")


@pytest.fixture(scope="session")
def redis_server(
    may_start_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """A Redis server for this test run; tests that break a server start one of their own."""
    needs.redis()
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was used or lacking: tests that are skipped for want of something prove nothing."""
    terminalreporter.write_line(f"Redis server of the tests: {redis_binary() or 'none'}")
    skipped = terminalreporter.getreports("skipped")
    if count := sum(needs.NO_SMOLLM2 in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"Skipped for want of SmolLM2: {count}. `make model` makes it.")
