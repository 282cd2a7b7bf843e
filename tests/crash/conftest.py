"""Fixtures: the process that carries out plans, and the databases that its runs empty."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from server.database.database import Database
from tests.crash.plans import Plan
from tests.crash.run import Result
from tests.crash.sweep import Order

JOBS = 4
"""Number of runs at a time, on two cores: runs wait more than they compute."""

CarryOut = Callable[[list[Plan], str], list[Result]]


@pytest.fixture(scope="session")
def carry_out(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[CarryOut]:
    """Yield a function (plans, "sqlite" or "postgresql") -> results in any order."""
    command = [sys.executable, "-m", "tests.crash.sweep", str(tmp_path_factory.mktemp("crash"))]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin
        assert process.stdout

        def carry_out(plans: list[Plan], database: str) -> list[Result]:
            urls = [None] * JOBS
            if database == "postgresql":
                urls = request.getfixturevalue("postgres_urls")
            assert process.stdin
            assert process.stdout
            process.stdin.write(msgspec.json.encode(Order(plans, urls)) + b"\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=list[Result])

        yield carry_out
        process.stdin.close()


@pytest.fixture(scope="session")
def postgres_urls(
    make_postgres: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Return the URLs of migrated databases, one for each run at a time."""
    url = make_postgres("template1")
    folder: Path = tmp_path_factory.mktemp("migrated")
    database = Database(url, data_dir=folder)
    database.migrate()
    database.close()
    template = str(sa.engine.make_url(url).database)
    return [make_postgres(template) for _ in range(JOBS)]
