"""Tokens per CPU second against distinct adapters in the burst, a line for every system."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

# Drawn again from the same rows, a file stays the same.
matplotlib.rcParams["svg.hashsalt"] = "chorale"
_SIZE_INCHES = (7.6, 4.8)
_BENCHES = ("engine", "peers")

Line = list[dict[str, Any]]  # rows by rising number of adapters


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.peers plot", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="of bench.engine and bench.peers")
    parser.add_argument("--out", type=Path, required=True, help="an SVG")
    options = parser.parse_args(arguments)
    texts = [path.read_text() for path in options.rows]
    draw([json.loads(line) for text in texts for line in text.splitlines()], options.out)


def draw(rows: Iterable[dict[str, Any]], path: Path) -> None:
    lines = lines_of(rows)
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    counts = sorted({row["setup"]["adapters"] for line in lines.values() for row in line})
    for name, line in lines.items():
        _draw_line(axes, name, line, counts)
    _label(axes, lines, counts)
    figure.savefig(path, metadata={"Date": None})


def lines_of(rows: Iterable[dict[str, Any]]) -> dict[str, Line]:
    """System and precision -> its rows. Without those that have no valid figure."""
    lines: dict[str, Line] = {}
    for row in rows:
        result = row["result"]
        drawn = row["bench"] in _BENCHES and result.get("output_tokens_per_cpu_s")
        if drawn and result.get("valid", True):
            setup = row["setup"]
            lines.setdefault(f"{setup['system']}, {setup['precision']}", []).append(row)
    for line in lines.values():
        line.sort(key=lambda row: row["setup"]["adapters"])
    return dict(sorted(lines.items(), key=lambda item: -_speed(item[1][-1])))


def _draw_line(axes: Axes, name: str, line: Line, counts: list[int]) -> None:
    ours = line[0]["bench"] == "engine"
    mixed = line[0]["setup"].get("co_batched", True)
    axes.plot(
        [counts.index(row["setup"]["adapters"]) for row in line],
        [_speed(row) for row in line],
        label=name if mixed else f"{name} (one adapter at a time)",
        marker="o",
        markerfacecolor=None if mixed else "white",
        linestyle="-" if line[0]["setup"]["precision"] == "float32" else "--",
        linewidth=2.4 if ours else 1.2,
    )


def _label(axes: Axes, lines: dict[str, Line], counts: list[int]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([10, 20, 50, 100, 200, 500])
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    setup = next(iter(lines.values()))[0]["setup"]
    threads = "one thread" if setup["threads"] == 1 else f"{setup['threads']} threads"
    axes.set_title(
        f"{setup['model']}, {setup['requests']} requests at once, "
        f"{setup['prompt_tokens']} prompt tokens, {setup['output_tokens']} output, {threads}",
        fontsize="medium",
    )
    axes.set_xlabel("distinct adapters among the requests")
    axes.set_ylabel("output tokens per CPU second")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.12))


def _speed(row: dict[str, Any]) -> float:
    return row["result"]["output_tokens_per_cpu_s"]
