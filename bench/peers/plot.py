"""Plots tokens per CPU second against distinct adapters in the burst, a line for every system."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

# Fixed ids: a picture drawn again from the same rows is the same file.
matplotlib.rcParams["svg.hashsalt"] = "chorale"
_SIZE_INCHES = (7.6, 4.8)
_BENCHES = ("engine", "peers")
_SAME = ("model", "requests", "prompt_tokens", "output_tokens", "threads")

Line = list[dict[str, Any]]  # rows in the order of their numbers of adapters


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.peers plot", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="files of bench.engine and bench.peers")
    parser.add_argument("--out", type=Path, required=True, help="the SVG to write")
    options = parser.parse_args(arguments)
    texts = [path.read_text() for path in options.rows]
    draw([json.loads(line) for text in texts for line in text.splitlines()], options.out)


def draw(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw the plot. Raises ValueError unless all rows are of one burst and number of threads."""
    lines = lines_of(rows)
    bursts = {tuple(row["setup"][n] for n in _SAME) for line in lines.values() for row in line}
    if len(bursts) != 1:
        raise ValueError(f"rows differ in {', '.join(_SAME)}: {sorted(bursts)}")
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    counts = sorted({row["setup"]["adapters"] for line in lines.values() for row in line})
    systems = list(dict.fromkeys(line[0]["setup"]["system"] for line in lines.values()))
    for name, line in lines.items():
        colour = f"C{systems.index(line[0]['setup']['system'])}"
        _draw_line(axes, name, line, counts, colour)
    _label(axes, bursts.pop(), counts)
    figure.savefig(path, metadata={"Date": None})


def lines_of(rows: Iterable[dict[str, Any]]) -> dict[str, Line]:
    """Return system and precision -> rows. Rows without a valid figure are left out."""
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


def _draw_line(axes: Axes, name: str, line: Line, counts: list[int], colour: str) -> None:
    ours = line[0]["bench"] == "engine"
    mixed = line[0]["setup"].get("co_batched", True)
    axes.plot(
        [counts.index(row["setup"]["adapters"]) for row in line],
        [_speed(row) for row in line],
        label=name if mixed else f"{name} (one adapter at a time)",
        color=colour,
        marker="o",
        markerfacecolor=colour if mixed else "white",
        linestyle="-" if line[0]["setup"]["precision"] == "float32" else "--",
        linewidth=2.4 if ours else 1.2,
    )


def _label(axes: Axes, burst: tuple[Any, ...], counts: list[int]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    model, requests, prompt, output, threads = burst
    prompt, output = (text.replace(":", " to ") for text in (prompt, output))
    axes.set_title(
        f"{model}: {requests} requests at once, {prompt} prompt tokens, {output} output tokens, "
        f"{'one thread' if threads == 1 else f'{threads} threads'}",
        fontsize="medium",
    )
    axes.set_xlabel("distinct adapters among the requests")
    axes.set_ylabel("output tokens per CPU second")
    axes.legend(
        frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14)
    )


def _speed(row: dict[str, Any]) -> float:
    return row["result"]["output_tokens_per_cpu_s"]
