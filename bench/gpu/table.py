"""Rows as text: a table for every bench, a column for every figure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WIDTH = 60
"""Longest cell in characters; longer ones are cut, and the rows' file has the whole text."""


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of all tables; goals are left to `bench.gpu.goals`."""
    lines: list[str] = []
    for bench in dict.fromkeys(row["bench"] for row in rows):
        of_bench = [row for row in rows if row["bench"] == bench]
        lines += ["", bench]
        lines += _table(list(map(_cells, of_bench)))
        lines += _table(_kernel_cells(of_bench))
    return lines


def _kernel_cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a line for each kernel of the rows that time kernels, with two cells for each row."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        for name, times in row["result"].get("kernels", {}).items():
            own = cells.setdefault(name, {})
            for figure, value in times.items():
                own[f"{figure}, {row['setup']['adapters']} adapters"] = str(value)
    return [{**own, "kernel": name[:_WIDTH]} for name, own in cells.items()]


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    apart = ("goals", "kernels")
    figures = {key: value for key, value in row["result"].items() if key not in apart}
    return dict(_flat("", {**row["setup"], **figures}))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", str(value)[:_WIDTH]


def _table(cells: Sequence[Mapping[str, str]]) -> list[str]:
    if not cells:
        return []
    columns = list(dict.fromkeys(name for row in cells for name in row))
    lines = [columns, *([row.get(name, "-") for name in columns] for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
