"""The file of rows: one row for each setup, and one for each system that was skipped."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.report import describe_machine, json_line

Row = dict[str, Any]


def write_rows(rows: Iterable[tuple[str, Row, Row]], path: Path | None) -> bool:
    """Print each (bench, setup, result) as it comes and put it into the file. Returns whether all
    are valid.
    """
    are_valid = True
    for bench, setup, result in rows:
        line = json_line(bench, describe_machine(), setup, result) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if path:
            put_row(path, line)
        are_valid &= result.get("valid", True)
    return are_valid


def put_row(path: Path, line: str) -> None:
    """Put a row in place of the row of the same setup. A row that says that its system was skipped
    replaces no measured row of that system, and stays until the system is measured.
    """
    old = path.read_text().splitlines(keepends=True) if path.exists() else []
    new = json.loads(line)
    if "skipped" in new["result"] and any(_measured(json.loads(row), new) for row in old):
        return
    kept = [row for row in old if not _replaces(new, json.loads(row))]
    path.write_text("".join([*kept, line]))


def _measured(old: Row, new: Row) -> bool:
    same = old["setup"]["system"] == new["setup"]["system"]
    return same and "skipped" not in old["result"]


def _replaces(new: Row, old: Row) -> bool:
    if new["setup"]["system"] != old["setup"]["system"]:
        return False
    return "skipped" in old["result"] or _key(new) == _key(old)


def _key(row: Row) -> Row:
    setup = {name: value for name, value in row["setup"].items() if name != "version"}
    return {"bench": row["bench"], "setup": setup}
