"""Processor time of a tree of processes, from /proc: what a busy machine changes least."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root_pid: int) -> dict[str, float]:
    """Module of `python -m` -> seconds, for a process's children; empty without /proc."""
    return {
        _module(pid): _seconds(pid)
        for pid, parent_pid in _parents().items()
        if parent_pid == root_pid
    }


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Between two readings."""
    return {name: round(after[name] - before.get(name, 0.0), 2) for name in after}


def _parents() -> dict[int, int]:
    """pid -> its parent's pid."""
    return {int(p.parent.name): int(_fields(p)[1]) for p in Path("/proc").glob("[0-9]*/stat")}


def _fields(stat: Path) -> list[str]:
    """From the third field on: the second, the name, may hold spaces."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return ["Z", "0"]


def _seconds(pid: int) -> float:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    user, system = (int(field) for field in fields[11:13])
    return (user + system) / _TICKS_PER_S


def _module(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("-m") + 1] if "-m" in words else f"process {pid}"
