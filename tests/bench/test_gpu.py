"""The GPU benchmarks without a GPU: they run to their last line, do not measure rows twice, and
compute floors and goals correctly.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import command, goals, vllm_lora
from bench.gpu.adapters import fill_tiles, make_form, num_slabs, place
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import Wrong, attempt, check_close, check_equal
from bench.gpu.lora_chain import SITES
from bench.gpu.lora_torch import Stacked
from bench.gpu.machine import LLAMA_8B, DryRun
from bench.gpu.rows import Broken, NoRoom, Row, RowFile, Runs, hash_sources
from bench.gpu.table import tables
from lora.layout import Layout
from lora.sites import site_of

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
    "gpu.ceilings", "gpu.launches", "gpu.small", "gpu.copy_slabs", "gpu.page_in",
    "gpu.decode_attention", "gpu.prefill_attention", "gpu.shared_prefix",
    "gpu.lora_decode", "gpu.lora_prefill",
    "gpu.engine_capture", "gpu.engine_check", "gpu.engine_decode", "gpu.engine_mixed",
    "gpu.engine_prefill", "gpu.open_loop",
}  # fmt: skip
VLLM_FILES = {
    "utils": "_LORA_A_PTR_DICT = {0: 'of another row'}\n_LORA_B_PTR_DICT = {}\n",
    "lora_shrink_op": """
from vllm.lora.ops.triton_ops.utils import _LORA_A_PTR_DICT
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

def lora_shrink(x, weights, h, mapping, tokens, counts, starts, ids, off, active, scale):
    assert not off.item() and not _LORA_A_PTR_DICT
    h.zero_()
    for i in range(active.item()):
        rows = tokens[starts[i] : starts[i] + counts[i]]
        for s, a in enumerate(weights):
            h[s, rows] = scale * x[rows].float() @ a[ids[i]].float().T
""",
    "lora_expand_op": """
def lora_expand(h, weights, y, mapping, tokens, counts, starts, ids, off, active,
                offset_start, add_inputs):
    assert add_inputs
    first = offset_start
    for s, b in enumerate(weights):
        for token, slot in enumerate(mapping.tolist()):
            part = y[token, first : first + b.shape[1]]
            part += (h[s, token] @ b[slot].float().T).to(y.dtype)
        first += b.shape[1]
""",
}


# ---- the command ----


@pytest.mark.timeout(1800)  # the test takes 45 s of a processor, longer on a busy machine
def test_a_dry_run_measures_every_bench_where_only_torch_is_installed(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT, "--dry", "--out", str(path)),
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["bench"] for row in rows} == BENCHES
    assert all(row["result"]["correct"] for row in rows)
    assert "not measured: " not in done.stdout
    assert f"{len(rows)} rows, 0 of them wrong" in done.stdout
    measured = {name for row in rows for name in row["result"].get("goals", {})}
    assert measured == set(goals.GOALS)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def parts(monkeypatch):
    """Return a function that gives the command one part, with a row per name and fixed ceilings."""

    def give(**measures):
        rows = [Row("gpu.test", {"case": name}, work) for name, work in measures.items()]
        monkeypatch.setattr(command, "parts_of", lambda _: {"some": lambda *_: iter(rows)})

    first = Row("gpu.ceilings", {}, lambda: {"copy_gb_per_s": 1.0})
    monkeypatch.setattr(command.ceilings, "row", lambda _: first)
    return give


def run_command(path):
    return command.run(["some"], True, path, math.inf, {})


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
    assert "4 rows, 1 of them wrong" in capfd.readouterr().out


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


def test_a_row_at_which_an_earlier_command_was_cut_short_is_not_called_wrong(
    path, parts, monkeypatch
):
    path.parent.mkdir()
    path.with_suffix(".begun").write_text('["gpu.test", {"case": "cut short"}]')
    parts(a=lambda: {"us": 1.0})
    monkeypatch.setattr(command, "DryRun", die)  # each child ends before it begins a row
    run_command(path)
    assert not path.exists()


def test_a_ceiling_that_fails_skips_nothing(path, parts, monkeypatch):
    monkeypatch.setattr(command.ceilings, "row", lambda _: Row("gpu.ceilings", {}, die))
    parts(a=lambda: {"us": 1.0})
    assert run_command(path) == 1
    assert results_in(path)["a"]["correct"]


@pytest.mark.usefixtures("parts")
def test_a_part_that_breaks_before_its_first_row_is_not_begun_for_ever(path, monkeypatch, capfd):
    monkeypatch.setattr(command, "parts_of", lambda _: {"some": lambda *_: 1 // 0})
    assert run_command(path) == 0
    assert "some: it raised an error, and before it measured anything" in capfd.readouterr().out


# 20 s: Triton compiles each kernel once, which takes a process without its interpreter.
@pytest.mark.soak
def test_the_host_part_of_a_step_is_counted_with_adapters_and_without():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = (sys.executable, "-m", "bench.gpu.host_part", "--repeats", "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    base, adapters = (json.loads(line) for line in done.stdout.splitlines())
    assert (base["setup"]["adapters"], adapters["setup"]["adapters"]) == (0, 16)
    counts = [row["result"]["by_kernel"]["launches"] for row in (base, adapters)]
    assert 32 * 8 < counts[0] < counts[1]
    assert all(row["result"]["engine"]["launches"] < 10 for row in (base, adapters))
    assert all(row["result"]["by_kernel"]["launch_cpu_ms"] > 0 for row in (base, adapters))


# ---- rows ----


def make_rows(*names, measure=lambda: {"us": 1.0}):
    return [Row("gpu.test", {"case": name}, measure) for name in names]


def make_runs(path, sources="abc", device="cpu", deadline_s=1.0, now_s=0.0, is_sound=True):
    file = RowFile(path, device, sources)
    return Runs(file, deadline_s, lambda: is_sound, clock=lambda: now_s)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "rows.jsonl"


def test_an_interrupted_run_goes_on_with_the_rows_that_are_not_there(path):
    make_runs(path).run(make_rows("a", "b"))
    calls = []
    again = make_runs(path)
    again.run(make_rows("a", "b", "c", measure=lambda: calls.append(1) or {"us": 2.0}))
    assert len(calls) == 1
    assert [row["result"]["us"] for row in again.file.rows()] == [1.0, 1.0, 2.0]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("other", [{"sources": "def"}, {"device": "another"}])
def test_rows_of_other_sources_or_another_device_are_not_ours(path, other):
    make_runs(path).run(make_rows("a"))
    runs = make_runs(path, **other)
    assert runs.file.rows() == []
    assert runs.file.find(make_rows("a")[0]) is None


def test_sources_are_told_by_what_is_in_them(tmp_path):
    for folder in ("kernels", "lora", "engine", "bench/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    kernel, other = tmp_path / "kernels" / "k.py", tmp_path / "server.py"
    seen = set()
    for text in ("x = 1", "x = 2"):
        kernel.write_text(text)
        other.write_text(text)
        seen.add(hash_sources(tmp_path))
        other.write_text("anything")
        seen.add(hash_sources(tmp_path))
    assert len(seen) == 2


def test_no_row_is_begun_when_the_time_is_up(path):
    runs = make_runs(path, now_s=1.0)
    runs.run(make_rows("a"))
    assert runs.missing == ['gpu.test {"case": "a"}: no time left']
    assert not path.exists()


def test_a_wrong_row_is_timed_and_written_as_wrong(path):
    def be_wrong():
        check_equal("tokens", torch.ones(3), torch.zeros(3))
        return {"us": 7.0, "share": math.nan}

    runs = make_runs(path)
    runs.run([*make_rows("a", measure=be_wrong), *make_rows("b")])
    wrong, good = (row["result"] for row in runs.file.rows())
    assert wrong == {"correct": False, "error": "tokens: 3 of 3 differ", "us": 7.0, "share": None}
    assert good == {"correct": True, "us": 1.0}


def test_a_row_that_raises_is_written_with_its_error(path, capsys):
    def fail():
        raise RuntimeError("no such kernel\nand more")

    runs = make_runs(path)
    runs.run([*make_rows("a", measure=fail), *make_rows("b")])
    first, second = (row["result"] for row in runs.file.rows())
    assert first == {"correct": False, "error": "RuntimeError: no such kernel"}
    assert second["correct"]
    assert "and more" in capsys.readouterr().err


def test_a_device_that_answers_no_more_ends_the_process_behind_its_row(path):
    runs = make_runs(path, is_sound=False)
    with pytest.raises(Broken):
        runs.run(make_rows("a", "b"))
    assert [row["setup"]["case"] for row in runs.file.rows()] == ["a"]


def test_a_row_without_room_is_missing_and_not_wrong(path):
    def want_room():
        raise NoRoom("128 adapters do not fit")

    runs = make_runs(path)
    runs.run(make_rows("a", measure=want_room))
    assert runs.file.rows() == []
    assert len(runs.missing) == 1


def test_what_fails_beside_ours_loses_its_own_figures_only(path):
    def fail():
        raise RuntimeError("no kernel image")

    def be_wrong():
        check_equal("theirs", torch.ones(3), torch.zeros(3))
        return {"us": 2.0}

    measure = lambda: {"us": 1.0, "torch": attempt(fail), "vllm": attempt(be_wrong)}  # noqa: E731
    runs = make_runs(path)
    runs.run(make_rows("a", measure=measure))
    (row,) = runs.file.rows()
    assert row["result"] == {
        "correct": True, "us": 1.0,
        "torch": {"failed": "RuntimeError: no kernel image"},
        "vllm": {"us": 2.0, "failed": "theirs: 3 of 3 differ"},
    }  # fmt: skip


def test_a_table_has_a_column_for_every_figure():
    rows = [
        {"bench": "x", "setup": {"T": 1}, "result": {"ours": {"us": 2.5}, "goals": {"g": {}}}},
        {"bench": "x", "setup": {"T": 2}, "result": {"vllm": "not brought"}},
    ]
    lines = [line.split() for line in tables(rows)[1:]]
    assert lines[:3] == [["x"], ["T", "ours.us", "vllm"], ["1", "2.5", "-"]]
    assert lines[3] == ["2", "-", "not", "brought"]


# ---- checks and goals ----


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


def test_adapters_may_add_their_bytes_and_a_share_of_the_step():
    bytes_per_rank = Layout.of(LLAMA_8B, 2).bytes_per_rank
    assert bytes_per_rank * 16 == 83_886_080
    # 16 adapters of rank 16 at 3 TB/s: 447 us of bytes, beside a step of 5.72 ms.
    limit = goals.lora_limit_s(16 * 16 * bytes_per_rank, 3e12, 5.72e-3)
    assert limit == pytest.approx(447.4e-6 / 0.8 + 0.143e-3, rel=1e-3)
    assert goals.lora_limit_s(0, 3e12, 4e-3) == pytest.approx(1e-4)


def test_a_decode_reads_weights_and_kv_once():
    kv_bytes = 64 * 1024 * Layout.of(LLAMA_8B, 2).kv_bytes_per_token
    assert goals.decode_floor_s(15.01e9, kv_bytes, 3e12) == pytest.approx(7.87e-3, rel=2e-3)


@pytest.mark.parametrize(("queries", "context"), [(1, 0), (7, 0), (5, 12)])
def test_flops_are_of_the_keys_that_queries_see(queries, context):
    keys = sum(context + query + 1 for query in range(queries))
    assert goals.causal_flops(4, 16, queries, context) == 2 * 2 * 4 * 16 * keys


def test_ceilings_are_in_units_of_one():
    result = {"copy_gb_per_s": 3000.0, "matmul_tflops": 700.0, "pinned_gb_per_s": 55.0}
    assert Ceilings.of(result) == Ceilings(3e12, 7e14, 5.5e10)


def test_a_goal_is_met_by_all_rows_or_says_which_missed_it():
    def row(goal, **setup):
        return {"setup": setup, "result": {"goals": goal}}

    rows = [
        row({"page_in": goals.at_least(0.9, 0.8)}),
        row({"engine_step": goals.at_most(1.2, 1.25)}, batch=1),
        row({"engine_step": goals.at_most(1.3, 1.25)}, batch=64),
        row({"lora_decode": goals.at_most(1.0, math.nan)}),  # the ceiling is not known
        {"setup": {}, "result": {}},
    ]
    lines = goals.verdicts(rows)
    by_goal = dict(zip(goals.GOALS, [x for x in lines if not x.startswith("  ")], strict=True))
    assert by_goal["page_in"].startswith("met ")
    assert by_goal["engine_step"].startswith("missed ")
    assert by_goal["engine_step"].endswith("1 of 2 rows")
    assert by_goal["lora_prefill"].startswith("not measured ")
    assert by_goal["lora_decode"].startswith("not measured ")
    assert [line.strip() for line in lines if line.startswith("  ")] == [
        "batch 64: 1.3, at most 1.25"
    ]


# ---- other projects' kernels ----


@pytest.fixture
def no_vllm():
    """Remove the stand-ins for vLLM's modules after the test."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_vllm")
def test_kernels_of_vllm_that_were_brought_add_what_ours_add(tmp_path):
    assert vllm_lora.find(tmp_path) is None
    folder = tmp_path / "vllm" / "lora" / "ops" / "triton_ops"
    folder.mkdir(parents=True)
    for name, text in VLLM_FILES.items():
        (folder / f"{name}.py").write_text(text)
    machine, slots = DryRun(), torch.tensor([0, 0, 2, 1, 1, 1])
    form = make_form(machine, Layout.of(machine.shape, machine.dtype.itemsize))
    ranks = (8, 24, 16)
    slabs = torch.empty(num_slabs(form.layout, ranks), form.layout.slab_bytes, dtype=torch.uint8)
    fill_tiles(slabs, form.layout, machine.dtype)
    tables_of = place(form, ranks, machine.there)
    sites = [site_of(machine.shape, 0, projections) for projections in SITES]
    stacked = Stacked(form, slabs, tables_of, slots, sites)
    brought = vllm_lora.find(tmp_path)
    assert brought is not None
    project = brought.system(stacked, sites)
    for site in sites:
        x = machine.randn(len(slots), site.in_features)
        weight = machine.randn(sum(site.out_features), site.in_features, std=site.in_features**-0.5)
        exact, _ = stacked.exact(x.float(), weight.float(), site)
        torchs, _ = stacked.gathered(x, weight, site)
        check_close("vllm", project(x, weight, site)[0], torchs, exact)
