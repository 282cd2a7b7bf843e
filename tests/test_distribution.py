"""What pyproject.toml and the files around it say to those who install Chorale."""

import importlib
import tomllib
from pathlib import Path

from server.version import VERSION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_said_in_one_place() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    module, _, name = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == VERSION
