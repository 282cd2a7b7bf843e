"""Writes docs/developer/benchmarks.md from the rows in bench/results.

`python -m bench.page` fills in bench/page.md.jinja; `--check` only says whether the page is
current. A figure that no row has ends the command.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench import json_lines
from bench.gpu.page import goal_table

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "developer" / "benchmarks.md"

Row = dict[str, Any]


def main(arguments: Sequence[str], page: Path = PAGE) -> int:
    written = render(read_rows(FOLDER / "results"))
    if "--check" not in arguments:
        page.write_text(written)
    elif not page.is_file() or page.read_text() != written:
        sys.stderr.write(f"{page} does not say what the rows say: run `make reference`.\n")
        return 1
    return 0


def read_rows(folder: Path) -> list[Row]:
    """All rows of all files, in the order in which they were appended."""
    files = sorted(folder.glob("*.jsonl"))
    return [row for file in files for row in json_lines.read(file)]


def render(rows: Sequence[Row]) -> str:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sig"] = significant
    template = environment.get_template("page.md.jinja")
    return template.render(
        result=lambda bench, **setup: result(rows, bench, setup), goals=goal_table(rows)
    )


def result(rows: Sequence[Row], bench: str, setup: Row) -> Row:
    """The newest result of a benchmark with these values in its setup. Raises LookupError."""
    for row in reversed(rows):
        if row["bench"] == bench and setup.items() <= row["setup"].items():
            return dict(row["result"])
    raise LookupError(f"no row of {bench} has the setup {setup}")


def significant(number: float, digits: int = 3) -> str:
    """A number rounded to so many digits, with separators and without an exponent."""
    rounded = float(f"{number:.{digits}g}")
    whole_digits = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    if whole_digits:
        return f"{rounded:,.{max(0, digits - whole_digits)}f}"
    return f"{number:.{digits}g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
