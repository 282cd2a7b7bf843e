"""The table of the goals of a GPU."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.gpu.goals import GOALS

Row = Mapping[str, Any]


def goal_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of every GPU, from the rows of its newest sources."""
    measured = [row for row in rows if row["bench"].startswith("gpu.")]
    newest = {row["device"]: row["sources"] for row in measured}
    for device, sources in newest.items():
        own = [row for row in measured if (row["device"], row["sources"]) == (device, sources)]
        yield from goal_lines(device, own)
    if not measured:
        yield from goal_lines("none yet", ())


def goal_lines(device: str, rows: Sequence[Row]) -> Iterator[str]:
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
