"""`python -m bench.gpu.page`: writes the results for each goal into bench/GPU.md, from results/."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.goals import GOALS, found_of, setup_of, value_of

_BENCH = Path(__file__).parent.parent
_BEGIN, _END = "<!-- goals: python -m bench.gpu.page -->", "<!-- end of goals -->"


def main() -> None:
    page = _BENCH / "GPU.md"
    page.write_text(fill(page.read_text(), _BENCH / "results"))


def fill(text: str, results: Path) -> str:
    """Return the page with a new table of goals, made from the rows of every GPU in `results`."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    lines = ["| goal | GPU | rows | the row that is furthest from it |", "|---|---|---|---|"]
    for path in sorted(results.glob("gpu-*.jsonl")):
        rows = _newest(path)
        lines += [_line(name, text, rows) for name, text in GOALS.items()]
    if len(lines) == 2:
        lines += [f"| {goal} | none yet | | not measured |" for goal in GOALS.values()]
    return "\n".join([before + _BEGIN, *lines, _END + after])


def _newest(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the version of the sources that was measured last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["sources"] == rows[-1]["sources"]]


def _line(name: str, text: str, rows: list[dict[str, Any]]) -> str:
    found = found_of(name, rows)
    if not found:
        return f"| {text} | {rows[-1]['device']} | 0 | not measured |"
    row, goal = max(found, key=lambda pair: _distance(pair[1]))
    met = sum(goal["met"] for _, goal in found)
    furthest = f"{setup_of(row)}: {value_of(goal)}"
    return f"| {text} | {row['device']} | {met} of {len(found)} met | {furthest} |"


def _distance(goal: Mapping[str, Any]) -> float:
    """How many times too large or too small a value is; at most 1 if the goal is met."""
    if "at_most" in goal:
        return float(goal["value"]) / float(goal["at_most"])
    return float(goal["at_least"]) / float(goal["value"])


if __name__ == "__main__":
    main()
