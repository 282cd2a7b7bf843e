"""Processor time of a process's children, from /proc: a busy machine changes it least."""

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(parent_pid: int) -> dict[str, float]:
    """Return seconds by child, named by its `python -m` module; empty where there is no /proc."""
    seconds = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            # Fields from the third on: the second, the name, may hold spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent_pid:
                user, system = int(fields[11]), int(fields[12])
                seconds[_module(folder)] = (user + system) / _TICKS_PER_S
    return seconds


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the seconds spent between two readings, by module."""
    return {name: round(after[name] - before.get(name, 0.0), 2) for name in after}


def _module(folder: Path) -> str:
    words = (folder / "cmdline").read_text().split("\0")
    return words[words.index("-m") + 1] if "-m" in words else f"process {folder.name}"
