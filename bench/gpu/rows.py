"""Rows measured one after the other, each written as soon as it is measured: an interrupted run
goes on where it stopped.
"""

import hashlib
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import json_lines
from bench.child import left_s
from bench.gpu.check import collected, describe
from bench.report import json_line

_ROOT = Path(__file__).parent.parent.parent
_SOURCES = ("kernels", "lora", "engine", "bench/gpu")

Key = tuple[str, str, str, str]
"""Key of a row: bench, sources, device, setup."""


class Broken(Exception):
    """The device no longer answers: further rows have to be measured by another process."""


@dataclass(frozen=True)
class Row:
    """A row to be measured. measure: returns the row's `result`."""

    bench: str
    setup: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


def hash_sources(root: Path = _ROOT) -> str:
    """Return a name for the measured code. A commit would not do: git may not be installed."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class RowFile:
    """Rows of the same sources on one device, in a file that may hold other rows, too."""

    path: Path
    device: str
    sources: str = field(default_factory=hash_sources)

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Read what other processes have written, too."""
        self._rows: dict[Key, dict[str, Any]] = {}
        for row in json_lines.read(self.path):
            self._rows[row["bench"], row["sources"], row["device"], _text(row["setup"])] = row

    def find(self, row: Row) -> dict[str, Any] | None:
        return self._rows.get(self._key(row.bench, row.setup))

    def add(self, bench: str, setup: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        row = json.loads(json_line(bench, self.device, dict(setup), _finite(result)))
        row["sources"] = self.sources
        json_lines.append(self.path, row)
        self._rows[self._key(bench, setup)] = row

    def rows(self) -> list[dict[str, Any]]:
        """The rows of these sources and this device, whichever run they are from."""
        here = (self.sources, self.device)
        return [row for key, row in self._rows.items() if key[1:3] == here]

    def _key(self, bench: str, setup: Mapping[str, Any]) -> Key:
        return bench, self.sources, self.device, _text(setup)

    # ---- the row that is being measured, marked for the parent in case this process dies ----

    def begin(self, row: Row) -> None:
        self._begun.write_text(json.dumps([row.bench, dict(row.setup)]))

    def end(self) -> None:
        self._begun.unlink(missing_ok=True)

    def give_up(self, why: str) -> None:
        """Write the row that was begun and not ended, if there is one, as wrong."""
        if self._begun.exists():
            bench, setup = json.loads(self._begun.read_text())
            self.add(bench, setup, {"correct": False, "error": why})
            self.end()

    @property
    def _begun(self) -> Path:
        return self.path.with_suffix(".begun")


def set_deadly_alarm(seconds: int) -> None:
    """Have SIGALRM kill this process after `seconds`; 0 cancels the alarm.

    The system kills the process: a call that hangs in the driver would not run a Python handler.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


@dataclass
class Runs:
    """Measures rows, as long as there is time for one that takes as long as the longest so far.

    is_sound: whether the device still answers.   limit_s: limit of one row.   set_alarm: called
    with `limit_s` before a row and with 0 after it; see `set_deadly_alarm`.
    """

    file: RowFile
    is_sound: Callable[[], bool]
    limit_s: int = 0
    set_alarm: Callable[[int], object] = lambda _: None
    longest_s: float = 0.0

    def run(self, rows: Iterable[Row]) -> None:
        """Measure rows. Raises Broken when the device is lost; rows measured before are written."""
        for row in rows:
            name = f"{row.bench} {_text(row.setup)}"
            if self.file.find(row) is not None:
                _say(f"{name}: measured already")
            elif left_s() <= self.longest_s:
                _say(f"{name}: not measured, there is no time left")
            else:
                self._measure(row, name)

    def _measure(self, row: Row, name: str) -> None:
        start = time.monotonic()
        self.file.path.parent.mkdir(parents=True, exist_ok=True)
        self.file.begin(row)
        self.set_alarm(self.limit_s)
        result: Mapping[str, Any] = {}
        with collected() as wrong:
            try:
                result = row.measure()
            except Exception as error:
                traceback.print_exc()
                wrong.append(describe(error))
        self.set_alarm(0)
        seconds = time.monotonic() - start
        self.longest_s = max(self.longest_s, seconds)
        if result or wrong:
            verdict = {"correct": False, "error": wrong[0]} if wrong else {"correct": True}
            self.file.add(row.bench, row.setup, {**verdict, **result})
            _say(f"{name}: {json.dumps({**verdict, **result})}, {seconds:.1f} s")
        self.file.end()
        if not self.is_sound():
            raise Broken(name)


def _finite(result: Any) -> Any:
    """Return `result` with None for infinity and NaN, such as a share of an unknown ceiling."""
    if isinstance(result, Mapping):
        return {name: _finite(value) for name, value in result.items()}
    return None if isinstance(result, float) and not math.isfinite(result) else result


def _text(setup: Mapping[str, Any]) -> str:
    return json.dumps(setup, sort_keys=True)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
