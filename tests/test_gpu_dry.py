"""Checks of the GPU run dry; one that fails, hangs or dies is named, and ends no other."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from bench import child, json_lines
from tests.gpu.checks import CHECKS
from tests.gpu.harness import Checks

SOME = ("imports", "models.llama", "models.qwen3_moe", "engine.proofs.proof")


def run_dry(*arguments):
    """Run checks dry; return the names of those that passed, in order, and the last line."""
    done = subprocess.run(
        (sys.executable, "-m", "tests.gpu", "--dry", *arguments),
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return [line.split()[0] for line in lines if "  ok  " in line], lines[-1]


def test_checks_of_the_gpu_pass_dry(tmp_path):
    passed, last = run_dry("--record", str(tmp_path / "record"), "--only", *SOME)
    found = json_lines.read(tmp_path / "record")
    assert sorted((entry["check"], entry["ended"]) for entry in found) == [
        (name, "ok") for name in sorted(SOME)
    ]
    assert sorted(passed) == sorted(SOME)
    assert last.startswith(f"{len(SOME)} passed, 0 failed")


@pytest.mark.soak
@pytest.mark.timeout(1800)  # the test takes two minutes of a processor, longer on a busy machine
def test_every_check_of_the_gpu_passes_dry():
    passed, last = run_dry()
    assert sorted(passed) == sorted(CHECKS)
    assert passed[-1] == "memory.arena", "it wants the GPU for itself"
    assert last.startswith(f"{len(CHECKS)} passed, 0 failed")


# ---- checks that fail ----


def run(checks, timeout_s=60.0):
    """Run checks; return the lines that the harness printed, and the names of failed checks."""
    said = []
    harness = Checks(3, timeout_s, said.append)
    harness.run(checks)
    return said, harness.failed


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


def be_wrong():
    raise AssertionError("off by 0.25 at [3, 5]")


def test_a_check_that_dies_one_that_hangs_and_one_that_is_wrong_are_three_failed_lines():
    checks = {
        "memory": int, "dies": die, "hangs": partial(time.sleep, 1e6), "is wrong": be_wrong,
        "prints": partial(print, "42 GB/s"), "passes": int,
    }  # fmt: skip
    said, failed = run(checks, timeout_s=5.0)
    lines = {name: line for line in said for name in checks if line.startswith(f"{name}  ")}
    assert sorted(failed) == ["dies", "hangs", "is wrong"]
    assert lines["dies"].startswith("dies  FAILED  ")
    assert lines["dies"].endswith("SIGSEGV killed it")
    assert lines["hangs"].endswith("it was not done in 5 s")
    assert lines["is wrong"].endswith("it raised an error")
    below = "\n".join(said)
    assert "AssertionError: off by 0.25 at [3, 5]" in below
    assert "Fatal Python error: Segmentation fault" in below
    assert "most recent call first" in below.partition("hangs  FAILED")[2], "where it hangs"
    assert said[said.index(lines["prints"]) + 1] == "    42 GB/s"
    assert all("  ok  " in lines[name] for name in ("prints", "passes", "memory"))
    assert said[-1] == lines["memory"], "it wants the GPU for itself"


def test_a_check_that_leaves_processes_behind_leaves_none():
    script = "import subprocess as s; print(s.Popen(['sleep', '1000']).pid)"
    ended = child.run(partial(subprocess.run, (sys.executable, "-c", script)), timeout_s=60)
    assert ended.failure is None
    wait_for_end(int(ended.said))


def test_a_killed_child_takes_its_own_children_along():
    """A part of a command is killed while its checks run, each in a group of its own."""

    def run_child():
        child.run(wait_in_child, timeout_s=1e6, output=sys.stdout)

    def wait_in_child():
        sys.stdout.write(f"{os.getpid()}\n")
        time.sleep(1e6)

    ended = child.run(run_child, timeout_s=1.0)
    assert ended.how == "killed"
    wait_for_end(int(ended.said.splitlines()[0]))


def test_children_share_the_processors_as_threads_of_torch():
    own = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        works = {"a": lambda: sys.stdout.write(str(torch.get_num_threads()))}.items()
        ends = [dict(child.run_all(works, at_once, 60.0))["a"] for at_once in (1, 10**6)]
    finally:
        torch.set_num_threads(own)
    assert [int(ended.said) for ended in ends] == [min(64, os.cpu_count()), 1]


def wait_for_end(pid):
    """Wait for a killed process, which ends as soon as the system has time."""
    while is_running(pid):
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_that_failed_is_run_once_more_under_the_sanitizer(tmp_path, monkeypatch):
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(
        '#!/bin/sh\nwhile [ $1 != --log-file ]; do shift; done\necho "Invalid read in $*" > "$2"\n'
    )
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = []
    harness = Checks(1, 60.0, said.append)
    harness.run({"good": int, "bad": be_wrong})
    said.clear()
    harness.sanitize(("--seed", "7"))
    assert said[0] == "bad  compute-sanitizer"
    assert said[1].startswith("    Invalid read in")
    assert said[1].endswith("-m tests.gpu --in-process --only bad --seed 7")
    assert len(said) == 2
