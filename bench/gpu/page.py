"""`python -m bench.gpu.page`: writes the results for each goal into bench/GPU.md, from results/."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import json_lines
from bench.gpu.goals import GOALS

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
        rows = json_lines.read(path)
        newest = [row for row in rows if row["sources"] == rows[-1]["sources"]]
        lines += goal_lines(newest[-1]["device"], newest)
    if len(lines) == 2:
        lines += goal_lines("none yet", ())
    return "\n".join([before + _BEGIN, *lines, _END + after])


def goal_lines(device: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line of the table for each goal, from the rows of a device. Goals are for engines
    that run a shrink beside a product; rows of others are there to be compared.
    """
    rows = [row for row in rows if "lora_overlap" not in row["setup"]]
    for name, text in GOALS.items():
        found = [(row, goal) for row in rows if (goal := row["result"].get("goals", {}).get(name))]
        if not found:
            yield f"| {text} | {device} | | not measured |"
            continue
        row, goal = max(found, key=lambda pair: _distance(pair[1]))
        met = sum(goal["met"] for _, goal in found)
        limit = "at_most" if "at_most" in goal else "at_least"
        setup = ", ".join(f"{key} {value}" for key, value in row["setup"].items())
        furthest = f"{setup}: {goal['value']}, {limit.replace('_', ' ')} {goal[limit]}"
        yield f"| {text} | {device} | {met} of {len(found)} met | {furthest} |"


def _distance(goal: Mapping[str, Any]) -> float:
    """How many times too large or too small a value is; at most 1 if the goal is met."""
    if "at_most" in goal:
        return float(goal["value"]) / float(goal["at_most"])
    return float(goal["at_least"]) / float(goal["value"])


if __name__ == "__main__":
    main()
