"""What a process and its descendants have used, read from outside in /proc, whatever they run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES = 1, slice(11, 15)  # in a stat line, after the name; times of reaped children too


def cpu_seconds(root_pid: int) -> float:
    """User and system time until now, to 10 ms."""
    return sum(sum(map(int, _stat(pid)[_TIMES])) for pid in _tree(root_pid)) / _TICKS_PER_S


def peak_rss_mb(root_pid: int) -> float:
    """The sum of their own peaks, in MB of 10^6 bytes; shared pages count for each."""
    return sum(peak_mb(pid) for pid in _tree(root_pid))


def peak_mb(pid: int) -> float:
    """Of one process, since it started or since `forget_peak`; 0 for one that has ended."""
    # Not getrusage: its maximum survives exec, so a child begins with its parent's.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return (int(line.split()[1]) << 10) / 1e6
    return 0.0


def forget_peak(pid: int) -> None:
    """What it has now is its peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def find_children(pid: int, mark: str) -> list[int]:
    """Those with `mark` in their command line, whichever thread started them."""
    found = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return [child for child in found if mark in _command(child)]


def _tree(root_pid: int) -> Iterator[int]:
    """Those that live."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            pid = int(folder.name)
            children.setdefault(int(_stat(pid)[_PARENT]), []).append(pid)
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _stat(pid: int) -> list[str]:
    """The fields from the third on: the second, the name, may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
