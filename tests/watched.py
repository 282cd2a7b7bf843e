"""Finds calls that an engine's thread must not make: opening files, using sockets, waiting."""

import sys
import threading
from collections.abc import Callable

_WAITS = frozenset(
    {
        "acquire", "open", "read", "readinto", "send", "sendall", "recv", "recv_into", "connect",
        "wait", "sleep", "select", "poll", "stat",
    }
)  # fmt: skip
_watched: "dict[int, list[str]]" = {}
_is_hooked = threading.Event()


def forbidden_calls(work: Callable[[], object], timeout_s: float = 60.0) -> list[str]:
    """Run `work` on a thread of its own and return its forbidden calls. Raises the error of `work`.

    The profiler sees C functions, an audit hook sees files and sockets. An audit hook cannot be
    removed, so a process has only one.
    """
    if not _is_hooked.is_set():
        _is_hooked.set()
        sys.addaudithook(_audit)
    found: list[str] = []
    failures: list[BaseException] = []

    def profile(_frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in _WAITS:
            found.append(getattr(function, "__qualname__", ""))

    def run() -> None:
        _watched[threading.get_ident()] = found
        sys.setprofile(profile)
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:
            sys.setprofile(None)
            del _watched[threading.get_ident()]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the thread waits"
    if failures:
        raise failures[0]
    return found


def _audit(event: str, _arguments: object) -> None:
    found = _watched.get(threading.get_ident())
    if found is not None and (event == "open" or event.startswith(("socket.", "os."))):
        found.append(event)
