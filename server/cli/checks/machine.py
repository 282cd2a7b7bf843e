"""Checks of the machine: its disks, its memory, and how many files a process may open."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from server.cli.checks.check import Finding
from server.cli.units import megabytes, milliseconds
from server.launch.settings import Settings

_SLOW_SYNC_S = 0.1
"""Slowest good fsync: the final output of each request waits for one."""
_LEAST_SHARE = 0.02
"""Share of inodes, or of memory, below which they are short."""
_CGROUP = Path("/sys/fs/cgroup")


def check_disk(
    folder: Path, reserve_bytes: int | None, clock: Callable[[], float] = time.monotonic
) -> Finding:
    """Whether a folder, or the one that will hold it, has room, and syncs what is written to it.

    reserve_bytes: as of the settings. Raises OSError.
    """
    from registry.storage.free_space import FreeSpace

    is_there = folder.is_dir()
    while not folder.is_dir():
        folder = folder.parent
    space = FreeSpace(reserve_bytes)
    left_bytes, found = space.left_bytes(folder), os.statvfs(folder)
    if found.f_files and found.f_favail < _LEAST_SHARE * found.f_files:
        todo = "Delete small files on this volume, or make its file system anew with more inodes."
        return Finding("wrong", f"{found.f_favail:,} inodes are free.", todo)
    if left_bytes < 0:
        todo = "Make room, or lower disk_reserve_bytes: until then uploads get 507 no_room."
        return Finding("wrong", f"{megabytes(-left_bytes)} of the reserve are taken.", todo)
    room = f"{megabytes(left_bytes)} are free beyond the reserve"
    if space.is_low(folder):
        todo = "Make room before the reserve begins: from there on uploads get 507 no_room."
        return Finding("warning", f"Only {room}.", todo)
    if not is_there:
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to.")
        return Finding("ok", f"{room}; the folder will be made.")
    sync_s = _sync_time_s(folder, clock)
    if sync_s > _SLOW_SYNC_S:
        todo = "Each request's end waits for this: move the folder to a faster disk."
        return Finding("warning", f"An fsync takes {milliseconds(sync_s)}.", todo)
    return Finding("ok", f"{room}; an fsync takes {milliseconds(sync_s)}.")


def check_memory(cgroup: Path = _CGROUP) -> Finding:
    """Whether the machine, or this container, has memory left."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    with suppress(OSError):  # Other systems than Linux have no such file.
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(it.split()[1]) << 10 for it in lines if it.startswith("MemAvailable"))
    with suppress(OSError, ValueError):  # The file says "max" where there is no limit.
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        # Files that were read long ago count as used, and make room when memory is asked for.
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        total, free = min(total, limit), min(free, limit - used + int(stat["inactive_file"]))
    found = f"{megabytes(free)} of {megabytes(total)} are free."
    if free < _LEAST_SHARE * total:
        todo = "Lower arena_bytes or engines; `chorale plan` says what the settings need."
        return Finding("warning", found, todo)
    return Finding("ok", found)


def check_open_files(settings: Settings) -> Finding:
    """Whether a gateway may open a file for each of its connections."""
    from server.launch.open_files import OTHER_FILES, allow_open_files

    wanted = settings.max_connections + OTHER_FILES
    if (allowed := allow_open_files(wanted)) < wanted:
        todo = f"Raise the limit (ulimit -n, LimitNOFILE) to {wanted:,}, or lower max_connections."
        return Finding("warning", f"A process may open {allowed:,} files.", todo)
    return Finding("ok", f"A process may open {wanted:,} files.")


def _sync_time_s(folder: Path, clock: Callable[[], float]) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as file:
        file.write(bytes(4096))
        file.flush()
        began_s = clock()
        os.fsync(file.fileno())
        return clock() - began_s
