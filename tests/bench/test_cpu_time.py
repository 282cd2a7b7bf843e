"""Processor time of children is counted by their modules."""

import os
import subprocess
import sys

import pytest

from bench.cpu_time import cpu_seconds, spent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def test_children_are_named_by_the_module_they_run_and_only_they_are_counted() -> None:
    command = (sys.executable, "-m", "timeit", "-n1", "-r1", "-s", "import sys", "sys.stdin.read()")
    before = set(cpu_seconds(os.getpid()))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        assert set(cpu_seconds(os.getpid())) - before == {"timeit"}
        assert cpu_seconds(child.pid) == {}
    assert "timeit" not in cpu_seconds(os.getpid())


def test_what_was_spent_is_the_difference_also_of_a_child_that_started_between() -> None:
    assert spent({"engine": 1.5}, {"engine": 4.0, "server": 0.25}) == {
        "engine": 2.5,
        "server": 0.25,
    }
