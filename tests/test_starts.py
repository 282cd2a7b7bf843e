"""A start is cheap: what a process may never need is imported where it is used."""

import subprocess
import sys

import pytest

from server.database.database import Database


def imported(code: str, *arguments: str) -> set[str]:
    """The modules that a new process has after `code`."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    command = [sys.executable, "-c", script, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("server.__main__", "alembic boto3 engine.request httpx numpy redis rich torch"),
        ("engine.__main__", "boto3 llguidance pydantic triton"),
    ],
)
def test_a_process_imports_nothing_that_it_may_never_need(module, unneeded):
    assert not set(unneeded.split()) & imported(f"import {module}")


def test_a_database_with_the_newest_schema_is_opened_without_alembic(tmp_path):
    database = Database(data_dir=tmp_path)
    database.migrate()
    database.close()
    code = (
        "from pathlib import Path\n"
        "from server.database.database import Database\n"
        "database = Database(data_dir=Path(sys.argv[1]))\n"
        "database.migrate()\n"
        "database.close()"
    )
    assert "alembic" not in imported(code, str(tmp_path))
