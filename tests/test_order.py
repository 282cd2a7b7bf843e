"""Files are run in the order of what they took; files beside one stack are run by one worker."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import order
from tests.timings import Timings, keep


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SECONDS", {"tests/a.py": 7.0, "tests/e2e/demo/test_b.py": 60.0})


def test_a_worker_keeps_a_file_or_the_folder_of_a_stack_to_itself() -> None:
    assert order.scope_of("tests/lora/test_arena.py::test_a") == "tests/lora/test_arena.py"
    assert order.scope_of("tests/e2e/test_clock.py::test_a[1-2]") == "tests/e2e/test_clock.py"
    assert order.scope_of("tests/e2e/demo/test_page.py::test_a[a/b]") == "tests/e2e/demo"
    assert order.scope_of("tests/ray/test_decisions.py::test_a") == "tests/ray"


def test_a_scope_takes_as_long_as_its_files_took_and_one_that_is_new_a_moment() -> None:
    assert order.seconds(["tests/a.py::test_x", "tests/a.py::test_y"]) == 7.0
    assert 0 < order.seconds(["tests/new.py::test_x"]) < 1


def test_a_file_that_takes_long_or_starts_servers_is_not_fast() -> None:
    assert not order.is_fast("tests/a.py")
    assert not order.is_fast("tests/e2e")
    assert order.is_fast("tests/new.py")


def test_a_run_of_some_files_replaces_their_seconds_alone(tmp_path: Path) -> None:
    path = tmp_path / "build" / "seconds.json"
    keep({"a.py": [1.0, 2.0], "b.py": [3.0, 4.0]}, path)
    keep({"b.py": [5.0, 6.0]}, path)
    kept = {"a.py": [1.0, 2.0], "b.py": [5.0, 6.0]}
    assert json.loads(path.read_text()) == kept


def test_a_file_is_charged_for_its_own_tests_alone() -> None:
    timings = Timings(SimpleNamespace())
    timings.pytest_runtestloop()
    first, second = (SimpleNamespace(nodeid=f"{name}.py::test_x") for name in "ab")
    for item, following in ((first, first), (first, second), (second, None)):
        running = timings.pytest_runtest_protocol(item, following)
        next(running)
        if item is first:
            subprocess.run((sys.executable, "-c", "sum(range(10**7))"), check=True)
        with contextlib.suppress(StopIteration):
            next(running)
    assert timings.seconds["a.py"][1] > timings.seconds["b.py"][1]
