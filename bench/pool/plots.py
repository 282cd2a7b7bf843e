"""Draws the row `pool.load`, beside the file that holds it. Needs no display."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Fixed ids: a picture drawn again from the same rows is the same file.
matplotlib.rcParams["svg.hashsalt"] = "chorale"
_SIZE_INCHES = (9.6, 4.0)
_LABELS = {
    "product": "ours",
    "random": "random",
    "round_robin": "round robin",
    "least_loaded": "least loaded",
    "consistent_hash": "consistent hash alone",
}

Row = dict[str, Any]


def draw_all(results: Path) -> list[Path]:
    """Draw <results>-load.svg if `results` has its row; return the paths drawn."""
    rows = {row["bench"]: row for row in map(json.loads, results.read_text().splitlines())}
    if "pool.load" not in rows:
        return []
    path = results.with_name(f"{results.stem}-load.svg")
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    loads, waits = figure.subplots(1, 2)
    row = rows["pool.load"]
    _draw(loads, row, "copied_per_request", "cold loads a request")
    _draw(waits, row, "ttft_ms_p99", "first token, p99, ms")
    waits.set_yscale("log")
    loads.set_ylim(bottom=0)
    loads.legend(frameon=False)
    (engines, adapters) = row["setup"]["sizes"][0]
    figure.suptitle(f"{engines} modelled engines, {adapters:,} adapters by zipf")
    figure.savefig(path, metadata={"Date": None})
    return [path]


def _draw(axes: Axes, row: Row, name: str, label: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    cases = row["result"]["cases"]
    for policy, policy_label in _LABELS.items():
        values = [case["policies"][policy][name] for case in cases]
        axes.plot([case["load"] for case in cases], values, marker="o", label=policy_label)
    axes.set_xlabel("load, as a share of what the engines can do")
    axes.set_ylabel(label)
