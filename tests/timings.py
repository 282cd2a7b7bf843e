"""Wall and processor seconds of each test file, measured by the workers of a run.

`make test` keeps them in build/test-seconds.json, from which `make order` writes the table that
`tests/order.py` reads. A file's processor seconds are those of the worker, its children and their
children, without servers that left the worker's process tree (PostgreSQL's).
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.process_tree import cpu_seconds
from tests.order import TABLE

KEPT = Path(__file__).parents[1] / "build" / "test-seconds.json"
_SHOWN = 20

Seconds = dict[str, list[float]]
"""Wall and processor seconds by file, by its path from the root."""


class Timings:
    """A plugin of pytest: a worker measures its files, the controller keeps and shows them all."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._began = time.monotonic()
        self.seconds: Seconds = {}
        self._read = (self._began, 0.0)

    def pytest_runtestloop(self) -> None:
        self._read = _now()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        result = yield
        file = _file(item)
        if nextitem is None or _file(nextitem) != file:
            read, self._read = self._read, _now()
            spent = self.seconds.setdefault(file, [0.0, 0.0])
            for i in (0, 1):
                spent[i] = round(spent[i] + self._read[i] - read[i], 2)
        return result

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["seconds"] = self.seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker measured, if it did not crash."""
        self.seconds |= getattr(node, "workeroutput", {}).get("seconds", {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if _is_whole(self._config):
            keep(self.seconds)
        wall_s = time.monotonic() - self._began
        # The workers have ended, so that they count as reaped children.
        for line in lines(self.seconds, wall_s, cpu_seconds(os.getpid())):
            terminalreporter.write_line(line)


def keep(seconds: Seconds, path: Path = KEPT) -> None:
    """Replace what the file has of these test files; the others stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before: Seconds = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | seconds, indent=0, sort_keys=True) + "\n")


def lines(seconds: Mapping[str, list[float]], wall_s: float, processor_s: float) -> Iterator[str]:
    """Yield the sums of a run, and its most expensive files."""
    tests_s = sum(cpu for _, cpu in seconds.values())
    yield (
        f"{wall_s:.0f} s of wall, {processor_s:.0f} s of processors, "
        f"of which {processor_s - tests_s:.0f} s to start and to collect the tests"
    )
    folders: Counter[str] = Counter()
    for file, (_, cpu) in seconds.items():
        folders["/".join(file.split("/")[:-1][:3])] += cpu
    yield "processor seconds by folder: " + ", ".join(
        f"{folder} {cpu:.0f}" for folder, cpu in folders.most_common() if cpu >= 1
    )
    yield "  wall  processor  the most expensive files"
    for file in sorted(seconds, key=lambda file: -seconds[file][1])[:_SHOWN]:
        wall, cpu = seconds[file]
        yield f"{wall:6.1f} {cpu:10.1f}  {file}"


def _is_whole(config: pytest.Config) -> bool:
    """Whether each file that was run was run with all of its tests."""
    return not config.option.keyword and not any("::" in argument for argument in config.args)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _now() -> tuple[float, float]:
    return time.monotonic(), cpu_seconds(os.getpid())


def write_table() -> None:
    """Write the wall seconds of the files of the last runs that take long enough to matter."""
    kept: Seconds = json.loads(KEPT.read_text())
    table = {
        file: round(wall)
        for file, (wall, _) in sorted(kept.items())
        if wall >= 1 and (KEPT.parents[1] / file).is_file()
    }
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    write_table()
