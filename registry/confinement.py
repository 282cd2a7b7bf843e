"""Limits that a process sets itself, for good, before it works on what strangers wrote."""

import ctypes
import os
import resource

_CLONE_NEWNET = 0x4000_0000
_CLONE_NEWUSER = 0x1000_0000


def confine(memory_bytes: int, file_bytes: int, cpu_s: int, open_files: int, niceness: int) -> bool:
    """Give up, for good, all that such work does not need; returns whether the network is gone."""
    os.nice(niceness)
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        # The system's own hard limit may be lower, and cannot be raised.
        allowed = resource.getrlimit(kind)[1]
        lower = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(kind, (lower, lower))
    return _leave_network()


def _leave_network() -> bool:
    """Enter a new, empty network namespace. False if the system does not allow it."""
    # os.unshare needs Python 3.12. A new user namespace makes the call work without root.
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    return unshare is not None and unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
