"""Rows measured one after the other, each written as soon as it is there: an interrupted run goes
on where it was.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import commit, json_line

Key = tuple[str, str, str, str]
"""bench, commit, device, setup."""


class NoRoom(Exception):
    """What the row needs does not fit into the device's memory."""


@dataclass(frozen=True)
class Row:
    """measure: the row's `result`."""

    bench: str
    setup: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


@dataclass
class RowFile:
    """The rows of one commit on one device, in a file that may hold others', too."""

    path: Path
    device: str
    commit: str = field(default_factory=commit)

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self._rows: dict[Key, dict[str, Any]] = {}
        for line in lines:
            row = json.loads(line)
            self._rows[row["bench"], row["commit"], row["device"], _text(row["setup"])] = row

    def find(self, row: Row) -> dict[str, Any] | None:
        return self._rows.get(self._key(row))

    def add(self, row: Row, result: Mapping[str, Any]) -> dict[str, Any]:
        line = json_line(row.bench, self.device, dict(row.setup), dict(result))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(line + "\n")
        written: dict[str, Any] = json.loads(line)
        self._rows[self._key(row)] = written
        return written

    def rows(self) -> list[dict[str, Any]]:
        """Of this commit and device, whichever run they are from."""
        here = (self.commit, self.device)
        return [row for key, row in self._rows.items() if key[1:3] == here]

    def _key(self, row: Row) -> Key:
        return row.bench, self.commit, self.device, _text(row.setup)


@dataclass
class Runs:
    """Measures rows until the time is up; keeps what became of those that were not.

    num_failed: rows whose figures would have been wrong, or that ended in an error.
    """

    file: RowFile
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    missing: list[str] = field(default_factory=list)
    num_failed: int = 0

    def run(self, rows: Iterable[Row]) -> None:
        for row in rows:
            name = f"{row.bench} {_text(row.setup)}"
            if self.file.find(row) is not None:
                _say(f"{name}: is there already")
            elif self.clock() >= self.deadline_s:
                self.missing.append(f"{name}: no time left")
            else:
                self._measure(row, name)

    def _measure(self, row: Row, name: str) -> None:
        start = self.clock()
        try:
            result = row.measure()
        except NoRoom as reason:
            self.missing.append(f"{name}: {reason}")
        except Exception:
            # A row that is wrong must not take with it the others of a machine that is seldom had.
            traceback.print_exc()
            self.missing.append(f"{name}: FAILED")
            self.num_failed += 1
        else:
            self.file.add(row, result)
            _say(f"{name}: {self.clock() - start:.1f} s")


def _text(setup: Mapping[str, Any]) -> str:
    return json.dumps(setup, sort_keys=True)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
