"""Keeps the processes of `chorale serve` running: starts, restarts with back-off, stops in order.

The supervisor knows nothing of what the processes do (see `server.launch.prepare`). It asks at
every poll which are wanted: a process that is not wanted any more is asked to go, and is killed
when its time is up; one that is wanted with another command is replaced in the same way.
There is one thread and no event loop: children are polled. A child whose loop has been silent for
too long is killed, and started again like one that died (`server.launch.watchdog`).
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from server.launch.errors import ServeError
from server.launch.log_files import LogFiles
from server.launch.watchdog import Watchdog

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDIN = 0
_PR_SET_PDEATHSIG = 1
_LOGS_S = 1.0
"""Interval between looks at the sizes of the log files."""
_MOST_FAILED_STARTS = 3
"""Exits with EX_DATAERR, one after the other, that count as one with EX_CONFIG."""
_SHOWN_LINES = 10
"""Lines of a log that are shown to say why a child could not start."""


class ChildCannotStart(ServeError):
    """A child ended and must not be started again.   log: the file that has its output."""

    def __init__(self, name: str, how: str, log: Path | None) -> None:
        super().__init__(f"The {name} {how}; {_last_words(log)}")


class Interrupted(BaseException):
    """A signal came while work was under way that polls nothing; see `Supervisor.interruptible`."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running.

    stop_timeout_s: seconds between SIGTERM and SIGKILL when all processes are stopped.
    leave_timeout_s: the same when this process alone has to go or to be replaced.
    stage: children of one stage are stopped together.
    first_beat_s: seconds until its first beat (lora.beat); None: it is not watched.
    on_refusal: called with the reason if the process says that it cannot start; what is wanted then
    decides whether it is tried again. None: all processes end.
    descriptors: open files that the process inherits; the supervisor closes its own when it stops.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_timeout_s: float = 5.0
    leave_timeout_s: float = 5.0
    stage: int = 0
    first_beat_s: float | None = None
    on_refusal: Callable[[str], None] | None = None
    descriptors: tuple[int, ...] = ()


Wanted = Callable[[], Sequence[ChildSpec]]
"""Returns the children that should run now, in the order of their start, each name once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Times of the supervisor, in seconds.

    The back-off doubles from first_delay_s to max_delay_s; after a child that lived for healthy_s
    it begins again at first_delay_s.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    healthy_s: float = 30.0
    poll_s: float = 0.2


class Supervisor:
    """Runs the children; used as `with Supervisor(wanted) as supervisor: supervisor.run()`.

    wanted: the children that should run, or a function that says which. They start in this order,
    and stop by stages, the highest first. SIGTERM and SIGINT ask for the end; a second one kills.
    logs: files for the children's output, one for each; None: this process's own output.
    reload: called at the next poll after SIGHUP, unless a terminal that has closed sent it, which
    asks for the end; None leaves SIGHUP as it is.   replace: the same after SIGUSR2.
    Children have sessions of their own, so that a terminal's Ctrl-C reaches them only through the
    supervisor, and on Linux they die with this process even if it is killed.
    """

    def __init__(
        self,
        wanted: Wanted | Sequence[ChildSpec],
        config: SupervisorConfig | None = None,
        *,
        logs: LogFiles | None = None,
        reload: Callable[[], None] | None = None,
        replace: Callable[[], None] | None = None,
    ) -> None:
        actions = {signal.SIGHUP: reload, signal.SIGUSR2: replace}
        self._actions = {number: act for number, act in actions.items() if act}
        self._asked_for: set[signal.Signals] = set()
        self._has_terminal = os.isatty(_STDIN)
        self._config = config or SupervisorConfig()
        self._logs = logs
        self._wanted = wanted if callable(wanted) else lambda: wanted
        self._children: dict[str, _Child] = {}
        self._logs_due_at = 0.0
        self._num_signals = 0
        self._is_interruptible = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Supervisor":
        for number in (*_SIGNALS, *self._actions):
            handler = self._on_signal if number in _SIGNALS else self._on_action
            self._previous_handlers[number] = signal.signal(number, handler)
        self.tend()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    @property
    def is_stopping(self) -> bool:
        return self._num_signals > 0

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now, by name."""
        return {name: c.process.pid for name, c in self._children.items() if c.process}

    def run(self, until: Callable[[], bool] = lambda: False, *, may_restart: bool = True) -> None:
        """Tend the children until a signal comes, or until `until` returns True at a poll.

        Raises ChildCannotStart if a child refuses to start, or if one failed and may_restart is
        False. A child refuses with exit code EX_CONFIG; with EX_DATAERR it failed to start for a
        reason that it does not know to last, and refuses the third time.
        """
        while not self.is_stopping and not until():
            self.tend(may_restart=may_restart)
            time.sleep(self._config.poll_s)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have a signal raise Interrupted in this block, which would delay the end otherwise."""
        self._is_interruptible = True
        try:
            if self.is_stopping:
                raise Interrupted
            yield
        finally:
            self._is_interruptible = False

    def tend(self, *, may_restart: bool = True) -> None:
        """Start the children that should run and are due; ask those to go that should not run."""
        while self._asked_for:
            self._actions[self._asked_for.pop()]()
        wanted = {spec.name: spec for spec in self._wanted()}
        for spec in wanted.values():
            if spec.name not in self._children:
                self._children[spec.name] = _Child(spec, self._config, self._logs)
        now = time.monotonic()
        for name, child in list(self._children.items()):
            child.tend(now, wanted.get(name), may_restart)
            if child.process is None and name not in wanted:
                del self._children[name]
        if self._logs and now >= self._logs_due_at:
            self._logs_due_at = now + _LOGS_S
            self._logs.tend()

    def _stop(self) -> None:
        # What children listen on is closed with the last of them, and refuses connections then.
        for descriptor in {d for child in self._children.values() for d in child.spec.descriptors}:
            os.close(descriptor)
        stages = {child.spec.stage for child in self._children.values()}
        for stage in sorted(stages, reverse=True):
            self._stop_stage([c for c in self._children.values() if c.spec.stage == stage])

    def _stop_stage(self, children: "Sequence[_Child]") -> None:
        for child in children:
            child.terminate()
        began_at = time.monotonic()
        for child in children:
            deadline = began_at + child.spec.stop_timeout_s
            while child.is_running and time.monotonic() < deadline and self._num_signals < 2:
                time.sleep(self._config.poll_s)
            child.kill()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1
        again = "killing" if self._num_signals > 1 else "stopping; once more kills"
        logger.info("%s: %s", signal.Signals(number).name, again)
        if self._is_interruptible:
            raise Interrupted

    def _on_action(self, number: int, frame: FrameType | None) -> None:
        has_closed = self._has_terminal and not os.isatty(_STDIN)
        if number == signal.SIGHUP and has_closed:
            self._on_signal(number, frame)
        else:
            self._asked_for.add(signal.Signals(number))


class Backoff:
    """Delays before the next starts of one child."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._delay_s = config.first_delay_s

    def next_delay_s(self, lived_s: float) -> float:
        """The delay in seconds before the next start, after a child that lived for `lived_s`."""
        if lived_s >= self._config.healthy_s:
            self._delay_s = self._config.first_delay_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._config.max_delay_s)
        return delay_s


class _Child:
    """A process under one name, and its successors.

    _kill_at: when the process is killed, if it has been asked to go; None otherwise.
    _watchdog: None if nobody watches the process, or if it has been killed for its silence.
    """

    def __init__(self, spec: ChildSpec, config: SupervisorConfig, logs: LogFiles | None) -> None:
        self.spec = spec
        self._logs = logs
        self.process: subprocess.Popen[bytes] | None = None
        self._config = config
        self._backoff = Backoff(config)
        self._num_failed_starts = 0
        self._started_at = 0.0
        self._due_at = 0.0
        self._kill_at: float | None = None
        self._watchdog: Watchdog | None = None

    @property
    def _log_path(self) -> Path | None:
        return self._logs.path(self.spec.name) if self._logs else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tend(self, now: float, wanted: ChildSpec | None, may_restart: bool) -> None:
        """Poll the process once.   wanted: what should run; None: nothing."""
        if self.process and not self.is_running:
            self._note_end(self.process.returncode, now, may_restart)
        if self.process and self._watchdog and self._watchdog.is_silent():
            self._kill_silent(self.process.pid, self._watchdog)
        if self.process and wanted != self.spec and self._kill_at is None:
            self.terminate()
            self._kill_at = now + self.spec.leave_timeout_s
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
            self._kill_at = None
        if self.process is None and wanted is not None:
            self._take_on(wanted)
            if now >= self._due_at:
                self._start(now)

    def _kill_silent(self, pid: int, watchdog: Watchdog) -> None:
        """Kill a child that stands still, and its own children; a later poll notes its end."""
        logger.error("%s %s: killed", self.spec.name, watchdog.complaint)
        self._unwatch()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _unwatch(self) -> None:
        if self._watchdog:
            self._watchdog.close()
            self._watchdog = None

    def _note_end(self, returncode: int, now: float, may_restart: bool) -> None:
        self.process = None
        self._unwatch()
        if self._kill_at is not None:
            logger.info("%s has left (%s)", self.spec.name, _describe(returncode))
            self._kill_at = None
            return
        self._num_failed_starts = self._num_failed_starts + 1 if returncode == os.EX_DATAERR else 0
        if returncode == os.EX_CONFIG or self._num_failed_starts == _MOST_FAILED_STARTS:
            refused = ChildCannotStart(
                self.spec.name, "cannot start with these settings", self._log_path
            )
            if self.spec.on_refusal is None:
                raise refused
            self.spec.on_refusal(str(refused))
        if returncode and not may_restart:
            how = f"ended before it was ready ({_describe(returncode)})"
            raise ChildCannotStart(self.spec.name, how, self._log_path)
        delay_s = self._backoff.next_delay_s(now - self._started_at)
        logger.warning(
            "%s ended (%s); again in %.1f s", self.spec.name, _describe(returncode), delay_s
        )
        self._due_at = now + delay_s

    def _take_on(self, wanted: ChildSpec) -> None:
        """Adopt the wanted command. A new command starts at once, since it has not failed yet."""
        if wanted != self.spec:
            self.spec, self._backoff, self._due_at = wanted, Backoff(self._config), 0.0

    def terminate(self) -> None:
        if self.process and self.is_running:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the child and whatever it started."""
        if self.process is None:
            return
        if self.is_running:
            logger.warning("%s did not stop in time: killed", self.spec.name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        self._unwatch()

    def _start(self, now: float) -> None:
        self._started_at = now
        first_beat_s = self.spec.first_beat_s
        watchdog = None if first_beat_s is None else Watchdog(first_beat_s)
        self._watchdog = watchdog
        logs = self._logs
        with logs.open(self.spec.name) if logs else contextlib.nullcontext() as output:
            self.process = subprocess.Popen(
                self.spec.command,
                env={**self.spec.environment, **(watchdog.environment if watchdog else {})},
                pass_fds=(*self.spec.descriptors, *((watchdog.descriptor,) if watchdog else ())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        logger.info("%s started (process %d)", self.spec.name, self.process.pid)


def _last_words(log: Path | None) -> str:
    if log is None:
        return "it says why above."
    lines = log.read_text(errors="replace").rstrip().splitlines()[-_SHOWN_LINES:]
    return "\n".join([f"{log} ends with:", *lines]) if lines else f"it wrote nothing to {log}."


def _describe(returncode: int) -> str:
    if returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit code {returncode}"


def die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A function that a child begins with, so that Linux kills it together with its supervisor."""
    if sys.platform != "linux":
        return None
    # libc is loaded here, since between fork and exec nothing may be imported.
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent died before prctl
            os._exit(1)

    return ask


@contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the lock that allows a data directory one supervisor. Raises ServeError."""
    with (data_dir / "supervisor.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ServeError(
                f"{data_dir} is in use by another `chorale serve` ({holder}); "
                "stop it, or choose another --data-dir."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield
