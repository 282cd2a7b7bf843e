"""Processor time and memory of a process and its children, also of children that have ended."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench import process_tree

# A parent that hands the work to a child, which holds 64 MB and then burns 0.3 s.
_CHILD = """
import sys, time
held = bytearray(64 << 20)
while time.process_time() < 0.3: pass
print("done", flush=True)
if {stay}: sys.stdin.read()
"""
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
if not {stay}: child.wait()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[True, False], ids=["child lives", "child ended"])
def stay(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def parent(stay: bool) -> Iterator[subprocess.Popen[str]]:
    code = _PARENT.format(child=_CHILD.format(stay=stay), stay=stay)
    with subprocess.Popen(
        (sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate("")


def test_a_childs_time_counts(parent) -> None:
    # Linux rounds user and system time down to whole ticks of 10 ms, for each process.
    assert process_tree.cpu_seconds(parent.pid) > 0.25


def test_the_memory_of_children_that_live_counts(parent, stay: bool) -> None:
    assert (process_tree.peak_rss_mb(parent.pid) > 64 * 1.048) is stay
