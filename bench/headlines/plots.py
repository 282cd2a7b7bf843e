"""Draws the rows of `bench.headlines`, beside the file that holds them. Needs no display."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Fixed ids: a picture drawn again from the same rows is the same file.
matplotlib.rcParams["svg.hashsalt"] = "chorale"
_SIZE_INCHES = (6.4, 4.0)

Row = dict[str, Any]


def draw_all(results: Path) -> list[Path]:
    """Draw an SVG for each picture whose row is in `results`: <results>-<picture>.svg."""
    rows = {row["bench"]: row for row in map(json.loads, results.read_text().splitlines())}
    drawn = []
    for name, (bench, draw) in _PICTURES.items():
        if bench in rows:
            path = results.with_name(f"{results.stem}-{name}.svg")
            _save(rows[bench], draw, path)
            drawn.append(path)
    return drawn


def _save(row: Row, draw: Callable[[Axes, Row], None], path: Path) -> None:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, row)
    figure.savefig(path, metadata={"Date": None})


def _batching(axes: Axes, row: Row) -> None:
    setup, speeds = row["setup"], row["result"]["output_tokens_per_s"]
    size, slots = setup["static_batch"], setup["max_num_seqs"]
    labels = {
        "one_at_a_time": "one at a time",
        "static": f"static batches of {size}",
        "continuous_same_size": f"continuous, at most {size}",
        "continuous": f"continuous, at most {slots}",
    }
    bars = axes.barh(list(labels.values()), [speeds[name] for name in labels])
    axes.bar_label(bars, [f" {speeds[name]:,.0f}" for name in labels])
    axes.invert_yaxis()
    low, high = setup["output_tokens"]
    axes.set_title(f"{setup['requests']} requests of {low} to {high} tokens ({setup['stack']})")
    axes.set_xlabel("generated tokens a second")


def _kv(axes: Axes, row: Row) -> None:
    kv, limit = row["result"]["kv"], row["setup"]["max_model_len"]
    labels = {
        "to_max_model_len": f"reserved, {limit:,} tokens each",
        "to_own_length": "reserved, final length each (nobody knows it)",
        "paged": "blocks (ours)",
        "written": "written",
    }
    for name, label in labels.items():
        waste = f", {kv['waste'][name]:.1%} waste" if name in kv["waste"] else ""
        steps = range(0, kv["steps"], kv["every"])
        axes.plot(steps, kv["tokens"][name], label=label + waste)
    axes.set_yscale("log")
    axes.set_title("Memory for KV during the continuous run")
    axes.set_xlabel("step")
    axes.set_ylabel("tokens of KV")
    axes.legend(frameon=False)


def _shared_prefix(axes: Axes, row: Row) -> None:
    setup, result = row["setup"], row["result"]
    values = [result[name]["requests_per_s"] for name in ("without_cache", "cached")]
    bars = axes.barh(["without prefix cache", "with"], values)
    axes.bar_label(bars, [f" {value:.2f}" for value in values])
    axes.invert_yaxis()
    shared, prompt = setup["shared_tokens"], setup["prompt_tokens"]
    axes.set_title(f"{shared} of {prompt} prompt tokens shared ({setup['stack']})")
    axes.set_xlabel("requests a second")


def _goodput(axes: Axes, row: Row) -> None:
    setup, curves = row["setup"], row["result"]["curves"]
    labels = {
        "continuous": "continuous",
        "static": f"static batches of {setup['static_batch']}",
        "one_at_a_time": "one at a time",
    }
    for name, label in labels.items():
        sent = [point["sent_per_s"] for point in curves[name]]
        axes.plot(sent, [p["good_per_s"] for p in curves[name]], marker="o", label=label)
    axes.plot(sent, sent, linestyle=":", color="grey", label="all of them")
    ttft_s, tpot_ms = setup["ttft_limit_s"], 1000 * setup["tpot_limit_s"]
    axes.set_title(f"First token within {ttft_s:g} s, the others every {tpot_ms:g} ms")
    axes.set_xlabel("requests a second, sent")
    axes.set_ylabel("requests a second, within limits")
    axes.legend(frameon=False)


_PICTURES: dict[str, tuple[str, Callable[[Axes, Row], None]]] = {
    "batching": ("headlines.batching", _batching),
    "kv": ("headlines.batching", _kv),
    "shared-prefix": ("headlines.shared-prefix", _shared_prefix),
    "goodput": ("headlines.goodput", _goodput),
}
