"""`python -m tests.pairs.forked SETTINGS.json`: `chorale serve` whose processes start in no time.

Supervisor, gateway, fetchers, engines and ranks are the real processes. But in place of a new
Python, which would import torch for two seconds, each is a fork of this process, which has imported
everything once and has done nothing else. Validators, which are confined, are new processes.
"""

import atexit
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# ruff: noqa: F401
import engine.__main__
import engine.cpu.draft_model
import engine.grammar.llguidance_matcher
import engine.rank_process
import engine.retired
import kernels.cpu.native
import lora.fetch
import server.__main__
from server.launch.prepare import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor

_POLL_S = 0.005
_new_process = subprocess.Popen


def pid_file(config: Path) -> Path:
    """The file that names the process of an engine with this configuration file."""
    return config.with_suffix(".pid")


class Forked:
    """A fork that runs `main` of a module of ours; it has what `Popen` has that we use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            if command[2] == "engine":
                pid_file(Path(command[3])).write_text(str(self.pid))
            return
        try:
            if start_new_session:
                os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)
            _close_others(pass_fds)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            if preexec_fn is not None:
                preexec_fn()
            _run(command[2], list(command[3:]))
        finally:
            os._exit(os.EX_SOFTWARE)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _close_others(kept: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue


def _run(module: str, arguments: list[str]) -> None:
    """Run a module as `python -m` does, and exit."""
    sys.argv = [module, *arguments]
    status: Any = os.EX_OK
    try:
        name = f"{module}.__main__" if module in ("engine", "server") else module
        importlib.import_module(name).main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else os.EX_OK if status is None else 1)


def fork_or_start(command: Sequence[str], **options: Any) -> Any:
    """Stand in for `subprocess.Popen`: fork for `python -m MODULE`, start other programs."""
    if command[0] == sys.executable and command[1] == "-m":
        known = ("env", "pass_fds", "start_new_session", "preexec_fn")
        return Forked(command, **{name: options[name] for name in known if name in options})
    return _new_process(command, **options)


def main() -> None:
    subprocess.Popen = fork_or_start  # type: ignore[misc,assignment]
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    with Supervisor(prepare(settings)) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
