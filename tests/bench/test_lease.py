"""The two commands for a lent GPU: parts end at their limits and leave lines, the second command
follows from the first one's record, and what is taken along is what the server needs.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.gpu import engine_rows
from bench.gpu.ceilings import Ceilings
from bench.gpu.lease import pack
from bench.gpu.lease.facts import show_facts
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.parts import Part, find_ptxas, run_parts, second_parts
from bench.gpu.machine import DryRun
from bench.gpu.rows import RowFile
from tests import needs
from tests.gpu.harness import Checks

ROOT = Path(__file__).parent.parent.parent
GPU_TRITON = Path(os.environ.get("GPU_TRITON", "no folder"))
CEILINGS = Ceilings(1e12, 1e15)


def make_lease(folder, command="first", kept=None):
    folder.mkdir(exist_ok=True)
    rows = RowFile(folder / "gpu.jsonl", "a GPU")
    lease = Lease(command, folder, kept or folder / "kept", rows, folder, 7, is_dry=False)
    lease.note(device="a GPU", seed=7)
    return lease


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ---- parts ----


def be_wrong():
    raise AssertionError("off by 0.25")


def say_and_wait():
    say("said before it hangs")
    time.sleep(1e6)


def test_a_part_that_overruns_is_killed_and_the_next_one_begins(tmp_path, capfd):
    lease = make_lease(tmp_path)
    parts = [
        Part("is wrong", 60, be_wrong),
        Part("hangs", 1, say_and_wait),
        Part("too late", 0, partial(say, "is begun all the same")),
    ]
    assert not run_parts(parts, lease, time.monotonic())
    closing = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in closing] == [
        ["is wrong", "failed"], ["hangs", "killed"], ["too late", "ok"],
    ]  # fmt: skip
    log = (tmp_path / "log.txt").read_text()
    for line in ("off by 0.25", "said before it hangs", "say_and_wait", "all the same", *closing):
        assert line in log
    assert log.index("--- hangs: at most") < log.index("said before it hangs")
    entries = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    assert [(entry["part"], entry["ended"]) for entry in entries[1:]] == [
        ("is wrong", "failed"), ("hangs", "killed"), ("too late", "ok"),
    ]  # fmt: skip


def test_what_checks_said_is_kept_when_their_time_or_their_parts_is_over(tmp_path, capfd):
    lease = make_lease(tmp_path)
    works = {"kernels.hangs": say_and_wait, "kernels.next": say_and_wait, "kernels.wrong": be_wrong}
    limits_s = {"kernels.hangs": 0.5, "kernels.next": 60, "kernels.wrong": 60}

    def note(name, ended):
        lease.note(check=name, ended=ended.how)

    def run_checks():
        for name, work in works.items():
            Checks(1, limits_s[name], say, note).run({name: work})

    run_parts([Part("checks", 5, run_checks)], lease, time.monotonic())
    assert (tmp_path / "log.txt").read_text().count("said before it hangs") == 2
    assert capfd.readouterr().out.splitlines()[1:] == [
        "    kernels.hangs  killed", "    kernels.next  dropped", "    kernels.wrong  dropped",
    ]  # fmt: skip


# ---- the first command's parts ----


def test_facts_are_found_dry_and_one_that_fails_is_named(capsys, monkeypatch):
    show_facts(is_dry=True)
    assert "capture on two streams: ok" in capsys.readouterr().out
    monkeypatch.setattr("bench.gpu.lease.facts.ops", None)
    with pytest.raises(AssertionError, match="failed: kernel on pinned memory"):
        show_facts(is_dry=True)


def test_a_step_is_broken_down_into_its_kernels():
    rows = engine_rows.kernel_rows(DryRun(), CEILINGS, {})
    (result,) = [row.measure() for row in rows]
    assert result["kernels"]["aten::mm"]["launches"] == 5, "four of the layer, and the head"
    times = [kernel["us"] for kernel in result["kernels"].values()]
    assert times == sorted(times, reverse=True)
    assert result["step_us"] == pytest.approx(sum(times), rel=1e-3)


# ---- compiling ----

MAKE_LAUNCHERS = """
import torch
from kernels.gpu import ops
from tests.gpu.compiling import make_launchers
from tests.kernels.aot import launches

with launches(90) as found:
    ops.gated(torch.empty(64, 64, dtype=torch.bfloat16), "silu")
make_launchers(found)
"""
CUDA = """
int cuCtxGetCurrent, cuCtxSetCurrent, cuDeviceGet, cuDevicePrimaryCtxRetain, cuFuncSetAttribute,
    cuGetErrorString, cuPointerGetAttribute;
"""


def test_launchers_are_compiled_once_in_advance(tmp_path):
    """Triton 3.6 has a launcher in C for each signature. libcuda is one in name only."""
    if not (GPU_TRITON / "triton").is_dir():
        needs.missing("Triton of GPU machines", "`make test` brings it and names its folder.")
    (tmp_path / "cuda.c").write_text(CUDA)
    library, failing = tmp_path / "libcuda.so.1", tmp_path / "cc"
    subprocess.run(("gcc", "-shared", "-o", library, tmp_path / "cuda.c"), check=True)
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "PYTHONPATH": os.pathsep.join((str(GPU_TRITON), str(ROOT))),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }  # fmt: skip
    for compiler in ("gcc", str(failing)):
        command = (sys.executable, "-c", MAKE_LAUNCHERS)
        done = subprocess.run(command, env=env | {"CC": compiler}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").rglob("*launcher*.so"))


# ---- the second command ----


def test_the_second_command_looks_for_a_broken_compiler_only_if_a_kernel_is_wrong(tmp_path):
    def names(*checks, folder):
        first = make_lease(tmp_path / folder)
        for name, ended in checks:
            first.note(check=name, ended=ended, seed=first.seed)
        lease = make_lease(tmp_path / folder, "second")
        return [part.name for part in second_parts(lease)]

    product = ["prepare", "product"]
    compilers = [*(f"ptxas {name}" for name in find_ptxas()), "sanitizer"]
    assert names(folder="well") == product
    others = ("models.llama", "failed"), ("kernels.rope", "dropped"), ("kernels.lora", "ok")
    assert names(*others, folder="others") == product
    assert names(("kernels.rope", "failed"), folder="kernel") == compilers
    assert names(("whole_numbers.shrink", "killed"), folder="numbers") == compilers
    assert names(folder="kernel") == product, "a newer run counts"


def test_the_record_of_the_first_command_is_kept_for_a_second_one_with_an_empty_folder(tmp_path):
    kept = tmp_path / "kept"
    make_lease(tmp_path / "first", kept=kept).note(check="a", ended="ok")
    entries = make_lease(tmp_path / "second", "second", kept).entries("first")
    assert entries[0]["seed"] == 7
    assert entries[1:] == [{"check": "a", "ended": "ok"}]


def test_what_the_server_needs_is_taken_along_or_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = needs_of(project["dependencies"])
    for name in pack.PACKAGES:
        needed |= needs_of(metadata.requires(name) or [])
    assert needed - {*pack.PACKAGES, *pack.THERE} == set()
    versions = pack.requirements((ROOT / "constraints.txt").read_text())
    assert [line.partition("==")[0] for line in versions] == list(pack.PACKAGES)


def needs_of(lines):
    """Return the names of packages that these lines require under Python 3.12."""
    python = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
    found = [Requirement(line) for line in lines]
    return {pack.normalized(r.name) for r in found if not r.marker or r.marker.evaluate(python)}


def test_a_pack_that_cannot_be_sent_with_the_tree_is_refused():
    assert pack.describe(18 << 20, 14 << 20) == ("18.0 MiB, with the tree 32.0 MiB", True)
    assert pack.describe(50 << 20, (14 << 20) + 1)[1] is False


# ---- rehearsals ----


def rehearse(command, folder):
    """Run a command dry; return the names of its rows, and its files' names."""
    done = subprocess.run(
        (sys.executable, "-m", "bench.gpu.lease", command, "--dry"),
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OUT": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + (folder / "log.txt").read_text()
    files = {path.name for path in folder.iterdir()}
    (rows,) = folder.glob("gpu-*.jsonl")
    lines = rows.read_text().splitlines()
    return {json.loads(line)["bench"] for line in lines}, files - {rows.name}


def test_the_product_is_rehearsed_on_the_cpu(tmp_path):
    """The model is small; server, pushes with their proofs, load and receipt are the real ones."""
    rows, files = rehearse("second", tmp_path)
    assert rows == {"gpu.product"}
    assert files == {"log.txt", "second.jsonl", "server.log"}


@pytest.mark.soak
@pytest.mark.timeout(1800)  # the test takes two minutes of a processor
def test_the_first_command_runs_dry_to_its_last_line(tmp_path):
    rows, files = rehearse("first", tmp_path)
    assert {"gpu.engine_kernels", "gpu.engine_prefill", "gpu.decode_attention"} <= rows
    assert files == {"log.txt", "first.jsonl"}
