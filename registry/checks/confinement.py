"""Processes that work on strangers' files: how they start, and limits that they set themselves."""

import ctypes
import os
import resource
from pathlib import Path

_CLONE_NEWNET = 0x4000_0000
_CLONE_NEWUSER = 0x1000_0000

_ROOT = str(Path(__file__).resolve().parents[1])
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import {0}; {0}.main()"
# A Python built with a shared library may need this to start.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)


def isolated(python: str, module: str, *arguments: str) -> list[str]:
    """The command that calls `main` of a module of ours, without PYTHON* variables, packages of the
    user and modules of the current folder.   python: the interpreter's path.
    """
    return [python, "-I", "-c", _START.format(module), _ROOT, *arguments]


def kept_variables() -> dict[str, str]:
    """The only environment variables that such a process gets of ours."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}


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
