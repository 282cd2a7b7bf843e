"""Checks as processes: an illegal access, a hang or a sticky CUDA error fails one check only."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import triton

from bench.child import Ended, left_s, run_all
from tests.gpu.setting import Check, Setting

_ALONE = "memory"
"""Prefix of the checks that take the whole GPU: they run when all others have ended."""
_SANITIZER = "compute-sanitizer"
_SANITIZER_S = 90.0
_SANITIZER_LINES = 40

Work = Callable[[], object]


def run_check(check: Check, make: Callable[[], Setting]) -> None:
    """Run a check on a device of its own, so that no capture outlives it; say what was compiled."""
    compiled_s: list[float] = []

    def note(*, times: "triton.knobs.CompileTimes", cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled_s.append(times.total / 1e6)

    triton.knobs.compilation.listener = note
    check(make())
    if compiled_s:
        sys.stdout.write(
            f"{len(compiled_s)} kernels were compiled here, in {sum(compiled_s):.1f} s\n"
        )


@dataclass
class Checks:
    """Runs checks, and says how each of them ended.

    at_once: how many run side by side.   timeout_s: limit of one check.
    note: is told how each check ended.   failed: names of failed checks.
    """

    at_once: int
    timeout_s: float
    say: Callable[[str], None]
    note: Callable[[str, Ended], object] = lambda name, ended: None
    num_passed: int = 0
    failed: list[str] = field(default_factory=list)

    def run(self, checks: Mapping[str, Work]) -> None:
        alone = {name: check for name, check in checks.items() if name.startswith(_ALONE)}
        self._run([(n, check) for n, check in checks.items() if n not in alone], self.at_once)
        self._run(alone.items(), 1)

    def _run(self, checks: Iterable[tuple[str, Work]], at_once: int) -> None:
        for name, ended in run_all(checks, at_once, self.timeout_s):
            self.note(name, ended)
            if ended.failure is None:
                self.num_passed += 1
                self.say(f"{name}  ok  {ended.seconds:.1f} s")
            else:
                # A dropped check says nothing about the code.
                self.failed += [name] if ended.how != "dropped" else []
                how = "dropped" if ended.how == "dropped" else "FAILED"
                self.say(f"{name}  {how}  {ended.seconds:.1f} s: {ended.failure}")
            self._say_below(ended.said)

    def sanitize(self, arguments: Sequence[str]) -> None:
        """Run each failed check once more under compute-sanitizer, if the machine has it.

        arguments: arguments of `tests.gpu` that repeat the check.
        """
        sanitizer = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path="/usr/local/cuda/bin")
        if self.failed and not sanitizer:
            self.say(f"{_SANITIZER} is not here")
        for name in self.failed if sanitizer else ():
            command = (sys.executable, "-m", "tests.gpu", "--in-process", "--only", name)
            self.say(f"{name}  {_SANITIZER}")
            self._say_below(_sanitized((str(sanitizer), *_OPTIONS), (*command, *arguments)))

    def _say_below(self, text: str) -> None:
        for line in text.splitlines():
            self.say(f"    {line}")


_OPTIONS = ("--tool", "memcheck", "--target-processes", "all", "--log-file")


def _sanitized(sanitizer: Sequence[str], command: Sequence[str]) -> str:
    """The first lines of the sanitizer's log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with suppress(subprocess.TimeoutExpired):  # the log has the findings up to then
            whole = (*sanitizer, str(log), *command)
            subprocess.run(whole, timeout=min(_SANITIZER_S, left_s()), capture_output=True)
        lines = log.read_text().splitlines() if log.exists() else ["it wrote nothing"]
    return "\n".join(lines[:_SANITIZER_LINES])
