"""A child process that does one piece of work, so that a crash or a hang ends nothing else.

The child is forked, so that it has its parent's imports and need not load torch again. The parent
must not have used the GPU before: CUDA does not survive a fork.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

_POLL_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How a child has ended.

    failure: a line that says why the child did not do its work; None if it did.
    said: everything that the child and its own children printed.   seconds: how long it took.
    """

    failure: str | None
    said: str
    seconds: float


class Child:
    """A forked process; it leads a process group, and its own children end with it.

    timeout_s: The child is killed when it takes longer. Shortly before, it prints its stack.
    is_heard: The child prints to its parent's output, and its output is not kept.
    """

    def __init__(
        self, work: Callable[[], object], timeout_s: float, is_heard: bool = False
    ) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (_end closes it)
        self._start = time.monotonic()
        # Flushed, or the child would print once more what is still in these buffers.
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_child(work, None if is_heard else self._log.fileno(), timeout_s)

    def poll(self) -> Ended | None:
        """Return how the child has ended; None while it works."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            return self._end(_failure(os.waitstatus_to_exitcode(status)))
        if time.monotonic() < self._start + self._timeout_s:
            return None
        self.kill()
        return self._end(f"it was not done in {self._timeout_s:.0f} s")

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _end(self, failure: str | None) -> Ended:
        seconds = time.monotonic() - self._start
        with suppress(ProcessLookupError):  # usually the child has left no children behind
            os.killpg(self._pid, signal.SIGKILL)
        with self._log as log:
            log.seek(0)
            return Ended(failure, log.read(), seconds)


def run_all(
    works: Iterable[tuple[str, Callable[[], object]]], at_once: int, timeout_s: float
) -> Iterator[tuple[str, Ended]]:
    """Run named works, each in a child, `at_once` of them side by side; yield each as it ends.

    works: The next work is taken from the iterable when there is a place for it.
    """
    waiting, running = iter(works), dict[str, Child]()
    try:
        while True:
            for name, work in islice(waiting, at_once - len(running)):
                running[name] = Child(work, timeout_s)
            if not running:
                return
            for name, child in list(running.items()):
                if (ended := child.poll()) is not None:
                    del running[name]
                    yield name, ended
            time.sleep(_POLL_S)
    finally:
        for child in running.values():  # the caller has closed the iterator early
            child.kill()


def run(work: Callable[[], object], timeout_s: float, is_heard: bool = False) -> Ended:
    """Run one work in a child, and wait for its end. is_heard: see Child."""
    child = Child(work, timeout_s, is_heard)
    try:
        while (ended := child.poll()) is None:
            time.sleep(_POLL_S)
    except BaseException:
        child.kill()
        raise
    return ended


def _be_child(work: Callable[[], object], log: int | None, timeout_s: float) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)  # the session stays the parent's: whoever ends it ends the child, too
        for fd in () if log is None else (1, 2):
            os.dup2(log, fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
        faulthandler.enable(sys.stderr)
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=sys.stderr)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _failure(exit_code: int) -> str | None:
    if exit_code == 0:
        return None
    if exit_code < 0:
        return f"{signal.Signals(-exit_code).name} killed it"
    return "it raised an error"
