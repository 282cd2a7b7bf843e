"""The harness of all benchmarks: options, turns, rows.

    python -m bench.billing --only settles --set requests=500 --out bench/results/billing-cpu.jsonl

A measurement's fields are the `setup` of its row, and `--set` changes them.
"""

import argparse
import ast
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from bench.report import describe_machine, json_line

T = TypeVar("T")
Figures = dict[str, Any]
Row = tuple[str, Figures, Figures]
"""Name of the benchmark, setup, result."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement.   told_apart: names in `setup` that tell apart rows of one benchmark's name;
    a new row replaces the old one with the same values.
    """

    told_apart: ClassVar[tuple[str, ...]] = ()

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        """Yield each row as soon as it is measured.

        folder: an empty folder on the disk that TMPDIR names.
        """
        yield bench, self.setup(), self.measure(folder)

    def setup(self) -> Figures:
        return asdict(self)

    def measure(self, folder: Path) -> Figures:
        """Return the result of a measurement that has a single row."""
        raise NotImplementedError


def main(module: str, measurements: Mapping[str, Measurement], description: str | None) -> None:
    """Run the measurements that the command line chooses. Exit status 1: a row is not valid.

    measurements: by their benchmark's name, as rows have it.
    """
    # SIGTERM raises SystemExit, so that started processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    by_word = {name.rpartition(".")[2]: name for name in measurements}
    parser = argparse.ArgumentParser(
        prog=module, description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", choices=by_word, action="append", help="run just this; may be repeated"
    )
    parser.add_argument(
        "--set", type=_value, action="append", default=[], metavar="NAME=VALUE",
        help="change a field of the setup, as in requests=500; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="file in which the rows are replaced")
    options = parser.parse_args()
    chosen = [by_word[word] for word in options.only or by_word]
    changed = changed_by({name: measurements[name] for name in chosen}, options.set)
    are_valid = True
    for name, measurement in changed.items():
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for row in measurement.rows(name, Path(folder)):
                write_row(row, options.out, measurement.told_apart)
                are_valid &= row[2].get("valid", True)
    sys.exit(not are_valid)


def changed_by(
    measurements: Mapping[str, Measurement], changes: Sequence[tuple[str, Any]]
) -> dict[str, Measurement]:
    """Return the measurements with these values of their fields. Raises SystemExit if none has
    such a field.
    """
    changed = dict(measurements)
    for field, value in changes:
        having = [name for name, one in changed.items() if field in {f.name for f in fields(one)}]
        if not having:
            raise SystemExit(f"no measurement has the field {field}")
        for name in having:
            kind = type(getattr(changed[name], field))
            if kind is tuple and not isinstance(value, tuple):
                fitting: Any = tuple(value.split(",")) if isinstance(value, str) else (value,)
            else:
                fitting = kind(value) if kind in (float, str) else value
            changed[name] = replace(changed[name], **{field: fitting})
    return changed


def write_row(row: Row, path: Path | None, told_apart: Sequence[str]) -> None:
    """Print the row, and put it into the file in place of the row that it replaces."""
    line = json_line(row[0], describe_machine(), *row[1:]) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if path:
        old = path.read_text().splitlines(keepends=True) if path.exists() else []
        new = _key(line, told_apart)
        path.write_text("".join([*(one for one in old if _key(one, told_apart) != new), line]))


def in_turns(rounds: int, *sides: Callable[[], T]) -> list[list[T]]:
    """Run the sides one after the other, `rounds` times; return the results of each side."""
    turns = [[side() for side in sides] for _ in range(rounds)]
    return [list(results) for results in zip(*turns, strict=True)]


def _key(line: str, told_apart: Sequence[str]) -> list[Any]:
    row = json.loads(line)
    return [row["bench"], *(row["setup"].get(name) for name in told_apart)]


def _value(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a value is a Python literal, or else a text."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError("give NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, float(value) if value == "inf" else value
