"""Fixtures that the files of a folder share, and that end with the folder's last test.

A fixture of pytest's session would live on: it costs processor time, and its surroundings (an event
loop of the browser's, variables of the environment) would disturb the tests that follow.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_made: dict[Callable[..., Iterator[Any]], Any] = {}
_ends = contextlib.ExitStack()


def folder_fixture(make: Callable[..., Iterator[Any]]) -> Any:
    """Make a fixture of a generator whose parameters are fixtures, for all modules of a folder."""

    @functools.wraps(make)
    def once(**fixtures: Any) -> Any:
        if make not in _made:
            _made[make] = _ends.enter_context(contextlib.contextmanager(make)(**fixtures))
        return _made[make]

    return pytest.fixture(scope="module")(once)


def end_of(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of a test's folder if the next test is not in this folder."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _made.clear()
        _ends.close()
