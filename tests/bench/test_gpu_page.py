"""bench/GPU.md agrees with the committed rows, and names only rows that are measured."""

import json
import re
from pathlib import Path

from bench.gpu import goals
from bench.gpu.page import fill
from tests.bench.test_gpu import BENCHES

BENCH = Path(__file__).parent.parent.parent / "bench"
PAGE = "Before.\n<!-- goals: python -m bench.gpu.page -->\nold\n<!-- end of goals -->\nAfter."


def test_the_page_is_what_its_command_makes_of_the_committed_rows():
    text = (BENCH / "GPU.md").read_text()
    assert fill(text, BENCH / "results") == text


def test_every_row_that_the_page_names_is_measured():
    named = set(re.findall(r"`(gpu\.\w+)`", (BENCH / "GPU.md").read_text()))
    assert named
    assert named <= BENCHES


def row(batch, goal, sources="new"):
    result = {"correct": True, "goals": {"engine_step": goal}}
    return {"sources": sources, "device": "H100", "setup": {"batch": batch}, "result": result}


def test_a_goal_shows_the_row_of_the_newest_sources_that_is_furthest_from_it(tmp_path):
    rows = [
        row(1, goals.at_most(9.0, 1.15), sources="old"),
        row(16, goals.at_most(1.1, 1.15)),
        row(64, goals.at_most(1.2, 1.15)),
    ]
    (tmp_path / "gpu-h100.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = fill(PAGE, tmp_path).splitlines()
    (line,) = [line for line in lines if "of 64 rows" in line]
    assert line.endswith("| H100 | 1 of 2 met | batch 64: 1.2, at most 1.15 |")
    (other,) = [line for line in lines if "pinned memory" in line]
    assert other.endswith("| H100 | 0 | not measured |")
    assert (lines[0], lines[-1]) == ("Before.", "After.")


def test_without_a_gpu_nothing_is_measured(tmp_path):
    text = fill(PAGE, tmp_path)
    assert text.count("| none yet | | not measured |") == len(goals.GOALS)
    assert fill(text, tmp_path) == text
