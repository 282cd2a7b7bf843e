"""Experiments by name: each runs on the model it names, and its row replaces the old row."""

import argparse
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.in_process import DEVICE, DTYPE, THREADS, EngineFactory
from bench.report import describe_machine, json_line


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """A measurement on one engine or several; its fields are the row's `setup`."""

    stack: str

    @abstractmethod
    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        """Return the row's `result`."""


def main(bench: str, experiments: Mapping[str, Experiment], description: str | None) -> Path | None:
    """Run the experiments that the command line names. Returns the file that `--out` names."""
    parser = argparse.ArgumentParser(prog=f"bench.{bench}", description=description)
    parser.add_argument(
        "--only", choices=experiments, action="append", help="run just this; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    options = parser.parse_args()
    lines = []
    for name in options.only or experiments:
        lines.append(row(f"{bench}.{name}", experiments[name]))
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    if options.out:
        replace_rows(options.out, lines)
    return options.out


def row(name: str, experiment: Experiment) -> str:
    """Runs an experiment and returns its row, a JSON line."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result = experiment.measure(EngineFactory(experiment.stack, Path(folder)))
    dtype = str(DTYPE).removeprefix("torch.")
    setup = asdict(experiment) | {"device": DEVICE, "dtype": dtype, "threads": THREADS}
    return json_line(name, describe_machine(), setup, result) + "\n"


def replace_rows(path: Path, lines: Sequence[str]) -> None:
    """Writes `lines` to the file, in place of rows of the same names; other rows stay."""
    names = {json.loads(line)["bench"] for line in lines}
    old = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in old if json.loads(line)["bench"] not in names]
    path.write_text("".join([*kept, *lines]))
