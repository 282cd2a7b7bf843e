"""Processor time and memory of a process and its descendants, read from outside in /proc."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TIMES = slice(11, 15)  # fields of a stat line after the name; reaped children count


def cpu_seconds(root_pid: int) -> float:
    """Return the user and system seconds of the tree so far, to 10 ms."""
    return sum(map(_cpu_s, _tree(root_pid)))


def children_cpu_seconds(pid: int) -> dict[str, float]:
    """Return the seconds of each child with its own children, by its `python -m` module."""
    return {_module(child): cpu_seconds(child) for child in find_children(pid)}


def peak_rss_mb(root_pid: int) -> float:
    """Return the sum of the processes' peaks, in MB of 10^6 bytes; shared pages count for each."""
    return sum(map(peak_mb, _tree(root_pid)))


def peak_mb(pid: int) -> float:
    """Return a process's peak in MB since it started; 0 if it has ended."""
    # getrusage would not do: its maximum survives exec, so a child begins with its parent's.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return (int(line.split()[1]) << 10) / 1e6
    return 0.0


def find_children(pid: int, mark: str = "") -> list[int]:
    """Return the children with `mark` in their command line, whichever thread started them."""
    found = []
    with contextlib.suppress(OSError):  # the process ended meanwhile
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return [child for child in found if mark in " ".join(_words(child))]


def _tree(root_pid: int) -> Iterator[int]:
    """Yield the process and its living descendants."""
    yield root_pid
    for child in find_children(root_pid):
        yield from _tree(child)


def _cpu_s(pid: int) -> float:
    try:
        # The second field, the name, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process ended meanwhile
        return 0.0
    return sum(map(int, fields[_TIMES])) / _TICKS_PER_S


def _module(pid: int) -> str:
    words = _words(pid)
    return words[words.index("-m") + 1] if "-m" in words else f"process {pid}"


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
