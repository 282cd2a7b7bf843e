"""The CHORALE_* variables of the user who runs the tests, which the tests do not see."""

import os

import pytest


def forget_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CHORALE_")]:
        monkeypatch.delenv(name)
