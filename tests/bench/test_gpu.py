"""The GPU benchmarks without a GPU: they run to their last line, do not measure rows twice, and
compute floors and goals correctly.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import child
from bench.gpu import command, goals, page
from bench.gpu.check import Wrong, check_close, check_equal
from bench.gpu.rows import Row, RowFile, Runs

ROOT = Path(__file__).parent.parent.parent
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "boto3", "fastapi", "httpx", "huggingface_hub", "jinja2", "matplotlib", "msgspec",
            "peft", "pydantic", "pytest", "sqlalchemy", "starlette", "tiktoken", "transformers",
            "uvicorn", "zmq",
        }:
            raise ModuleNotFoundError(f"no module named {name}", name=name)

sys.meta_path.insert(0, Missing())

from tests import interpreter

interpreter.use()
runpy.run_module("bench.gpu", run_name="__main__", alter_sys=True)
"""
BENCHES = {
    "gpu.ceilings", "gpu.decode_attention", "gpu.prefill_attention",
    "gpu.shared_prefix", "gpu.engine_check", "gpu.engine_decode", "gpu.engine_mixed",
    "gpu.engine_prefill", "gpu.engine_kernels",
}  # fmt: skip


# ---- the command ----


def dry_run(path, *parts):
    """Run parts where only torch is installed; return their rows, which are all right."""
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT, *parts, "--dry", "--out", str(path)),
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["result"]["correct"] for row in rows)
    assert f"{len(rows)} new rows, 0 of them wrong" in done.stdout
    return rows


def test_a_dry_run_measures_a_part_where_only_torch_is_installed(tmp_path):
    rows = dry_run(tmp_path / "rows.jsonl", "ceilings")
    assert {row["bench"] for row in rows} == {"gpu.ceilings"}


@pytest.mark.soak
@pytest.mark.timeout(1800)  # the test takes 45 s of a processor, longer on a busy machine
def test_a_dry_run_measures_every_bench(tmp_path):
    rows = dry_run(tmp_path / "rows.jsonl")
    assert {row["bench"] for row in rows} == BENCHES
    measured = {name for row in rows for name in row["result"].get("goals", {})}
    assert measured == set(goals.GOALS)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def parts(monkeypatch):
    """Return a function that gives the command one part, with a row per name and fixed ceilings."""

    def give(**measures):
        rows = [Row("gpu.test", {"case": name}, work) for name, work in measures.items()]
        monkeypatch.setattr(command, "PARTS", {"some": lambda *_: iter(rows)})

    first = Row("gpu.ceilings", {}, lambda: {"copy_gb_per_s": 1.0})
    monkeypatch.setattr(command.ceilings, "row", lambda _: first)
    return give


def run_command(path):
    return command.main(["some"], True, path, {})


def results_in(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["setup"]["case"]: row["result"] for row in rows if row["bench"] == "gpu.test"}


def test_a_row_that_kills_its_process_is_written_as_wrong_and_the_others_are_measured(
    path, parts, capfd
):
    parts(a=lambda: {"us": 1.0}, dies=die, b=lambda: {"us": 2.0})
    assert run_command(path) == 1
    assert results_in(path) == {
        "a": {"correct": True, "us": 1.0},
        "dies": {"correct": False, "error": "SIGSEGV killed it"},
        "b": {"correct": True, "us": 2.0},
    }
    assert "4 new rows, 1 of them wrong" in capfd.readouterr().out


def test_a_row_that_hangs_ends_at_its_limit(path, parts, monkeypatch):
    monkeypatch.setattr(command, "_DRY_ROW_S", 1)
    parts(hangs=lambda: time.sleep(1e6), b=lambda: {"us": 2.0})
    run_command(path)
    assert results_in(path)["hangs"] == {"correct": False, "error": "SIGALRM killed it"}
    assert results_in(path)["b"]["correct"]


def test_a_second_run_measures_what_the_first_one_did_not(path, parts):
    parts(a=lambda: {"us": 1.0}, dies=die)
    run_command(path)
    assert list(path.parent.iterdir()) == [path], "no row is under way any more"
    parts(a=lambda: {"us": 3.0}, dies=lambda: {"us": 3.0}, b=lambda: {"us": 3.0})
    run_command(path)
    assert [result.get("us") for result in results_in(path).values()] == [1.0, None, 3.0]


# ---- rows ----


def make_rows(*names, measure=lambda: {"us": 1.0}):
    return [Row("gpu.test", {"case": name}, measure) for name in names]


def make_runs(path, sources="abc", device="cpu"):
    return Runs(RowFile(path, device, sources), lambda: True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "rows.jsonl"


@pytest.mark.parametrize("other", [{"sources": "def"}, {"device": "another"}])
def test_rows_of_other_sources_or_another_device_are_not_ours(path, other):
    make_runs(path).run(make_rows("a"))
    runs = make_runs(path, **other)
    assert runs.file.rows() == []
    assert runs.file.find(make_rows("a")[0]) is None


def test_a_wrong_row_is_timed_and_written_as_wrong(path):
    def be_wrong():
        check_equal("tokens", torch.ones(3), torch.zeros(3))
        return {"us": 7.0, "share": math.nan}

    runs = make_runs(path)
    runs.run([*make_rows("a", measure=be_wrong), *make_rows("b")])
    wrong, good = (row["result"] for row in runs.file.rows())
    assert wrong == {"correct": False, "error": "tokens: 3 of 3 differ", "us": 7.0, "share": None}
    assert good == {"correct": True, "us": 1.0}


def test_a_row_for_which_there_is_no_time_is_not_begun(path):
    def run_rows():
        rows = [*make_rows("slow", measure=lambda: time.sleep(0.5) or {"us": 1.0})]
        make_runs(path).run([*rows, *make_rows("too late")])

    assert child.run(run_rows, timeout_s=2.7).how == "ok"
    assert list(results_in(path)) == ["slow"]


# ---- checks ----


def test_a_result_that_loses_more_than_torch_is_wrong():
    exact = torch.randn(64)
    torchs = exact.half()
    check_close("rounded alike", torchs.clone(), torchs, exact)
    for spoilt in (0.01, torch.nan):
        ours = torchs.clone()
        ours[7] += spoilt
        with pytest.raises(Wrong):
            check_close("spoilt", ours, torchs, exact)
    with pytest.raises(Wrong):
        check_equal("spoilt", torch.ones(3), torch.tensor([1, 1, 2]))


# ---- the page ----


def test_every_row_that_the_page_names_is_measured():
    named = set(re.findall(r"`(gpu\.\w+)`", (ROOT / "bench" / "GPU.md").read_text()))
    assert named
    assert named <= BENCHES | {"gpu.product"}


def test_a_goal_shows_the_row_of_the_newest_sources_that_is_furthest_from_it():
    def row(batch, goal, sources="new"):
        result = {"correct": True, "goals": {"engine_step": goal}}
        here = {"bench": "gpu.engine_decode", "sources": sources, "device": "H100"}
        return here | {"setup": {"batch": batch}, "result": result}

    rows = [
        row(1, goals.at_most(9.0, 1.15), sources="old"),
        row(16, goals.at_most(1.1, 1.15)),
        row(64, goals.at_most(1.2, 1.15)),
        row(64, goals.at_most(1.0, math.nan)),  # the ceiling is not known
        row(64, goals.at_most(1.3, 1.15)),
    ]
    rows[-1]["setup"]["lora_overlap"] = "none"
    lines = list(page.goal_table([{"bench": "serve"}, *rows]))
    (line,) = [line for line in lines if "of 64 rows" in line]
    assert line.endswith("| H100 | 1 of 2 met | batch 64: 1.2, at most 1.15 |")
    (other,) = [line for line in lines if "decode attention" in line]
    assert other.endswith("| H100 | | not measured |")
