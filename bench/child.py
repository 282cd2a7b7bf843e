"""A child process that does one piece of work, so that a crash or a hang ends nothing else.

The child is forked, so that it has its parent's imports and need not load torch again. The parent
must not have used the GPU before: CUDA does not survive a fork. A child ends with its parent.
"""

import ctypes
import faulthandler
import math
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NoReturn

import torch

_POLL_S = 0.02
_KILLED_S = 5.0
_killed_at = math.inf
"""Time of the monotonic clock at which this process is killed, if it is a child."""
_TELL_S = 2.0
"""Time that a child has after its own children's."""
_SHOW_STACK, _SHOW_S = signal.SIGUSR1, 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # loaded here, since a forked child should load nothing


@dataclass(frozen=True)
class Ended:
    """How a child has ended.

    failure: a line that says why the child did not do its work; None if it did.
    said: everything that the child and its own children printed.   seconds: how long it took.
    is_killed: whether it took too long.   is_cut: whether that was because its parent's time was
    over, before its own.
    """

    failure: str | None
    said: str
    seconds: float
    is_killed: bool = False
    is_cut: bool = False

    @property
    def how(self) -> str:
        """The end in a word: ok, failed, killed, or dropped if there was no time for it."""
        if self.is_killed:
            return "dropped" if self.is_cut else "killed"
        return "failed" if self.failure else "ok"


class Child:
    """A forked process; it leads a process group, and its own children end with it.

    timeout_s: The child is killed when it takes longer, after it has printed its stack.
    output: file that gets what the child prints; None: `Ended.said` gets it. If the parent is a
    child itself, such a child is killed a little before the parent's time is over, so that the
    parent can tell what it printed.
    at_once: number of children that share the processors.
    """

    def __init__(
        self,
        work: Callable[[], object],
        timeout_s: float,
        output: IO[str] | None = None,
        at_once: int = 1,
    ) -> None:
        self._timeout_s = timeout_s if output else min(timeout_s, left_s())
        self._is_cut = self._timeout_s < timeout_s
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (_end closes it)
        self._start = time.monotonic()
        parent = os.getpid()
        # Flushed, or the child would print once more what is still in these buffers.
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _end_with(parent)
            killed_at = min(self._start + self._timeout_s, _killed_at)
            _be_child(work, (output or self._log).fileno(), at_once, killed_at)

    def poll(self) -> Ended | None:
        """Return how the child has ended; None while it works."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return self._end(_failure(os.waitstatus_to_exitcode(status)))
        if time.monotonic() < self._start + self._timeout_s:
            return None
        os.kill(self.pid, _SHOW_STACK)
        time.sleep(_SHOW_S)
        self.kill()
        return self._end(f"it was not done in {self._timeout_s:.0f} s", is_killed=True)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        # A process that hangs in the driver may outlive this.
        until = time.monotonic() + _KILLED_S
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):  # usually the child has left no children behind
            os.killpg(self.pid, signal.SIGKILL)

    def _end(self, failure: str | None, is_killed: bool = False) -> Ended:
        seconds = time.monotonic() - self._start
        self._kill_group()
        with self._log as log:
            log.seek(0)
            return Ended(failure, log.read(), seconds, is_killed, is_killed and self._is_cut)


def left_s() -> float:
    """Return how long what this process starts may take, if it is to end before this process is
    killed; infinity if nothing kills it.
    """
    return max(0.0, _killed_at - time.monotonic() - _TELL_S)


def run_all(
    works: Iterable[tuple[str, Callable[[], object]]], at_once: int, timeout_s: float
) -> Iterator[tuple[str, Ended]]:
    """Run named works, each in a child, `at_once` of them side by side; yield each as it ends.

    A work is dropped if this process is about to be killed.
    """
    waiting, running = deque(works), dict[str, Child]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, work = waiting.popleft()
                if left_s():
                    running[name] = Child(work, timeout_s, at_once=at_once)
                else:
                    yield name, Ended("there was no time for it", "", 0.0, True, True)
            for name, child in list(running.items()):
                if (ended := child.poll()) is not None:
                    del running[name]
                    yield name, ended
            time.sleep(_POLL_S)
    finally:
        for child in running.values():  # the caller has closed the iterator early
            child.kill()


def run(work: Callable[[], object], timeout_s: float, output: IO[str] | None = None) -> Ended:
    """Run one work in a child, and wait for its end. output: see Child."""
    child = Child(work, timeout_s, output)
    try:
        while (ended := child.poll()) is None:
            time.sleep(_POLL_S)
    except BaseException:
        child.kill()
        raise
    return ended


def run_module(name: str, *arguments: str) -> None:
    """Do what `python -m name` does, in this process. Raises RuntimeError at an exit status that
    is not 0.
    """
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{name} ended with {end.code}") from None


def _end_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies, since it leads a group of its own."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before
        os._exit(1)


def _be_child(work: Callable[[], object], output: int, at_once: int, killed_at: float) -> NoReturn:
    global _killed_at
    status, _killed_at = 1, killed_at
    try:
        os.setpgid(0, 0)  # the session stays the parent's: whoever ends it ends the child, too
        for fd in (1, 2):
            os.dup2(output, fd)
        # A child of a child has such files already, which must not close these when they go.
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        faulthandler.enable(sys.stderr)
        # dump_traceback_later would do, but hangs in a child of a child.
        faulthandler.register(_SHOW_STACK, sys.stderr)
        share = max(1, (os.cpu_count() or 1) // at_once)
        torch.set_num_threads(min(share, torch.get_num_threads()))
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
