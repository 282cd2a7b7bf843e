"""The GPU's checks run dry, all of them, and say so; what fails is seen in the exit status."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.__main__ import passes
from tests.gpu.checks import CHECKS

HALVES = (
    ("imports", "kernels", "whole_numbers", "invariance"),
    ("models", "ranks", "graphs", "engine", "memory"),
)
"""Checks by the start of their names: a process for each half, 20 s."""


@pytest.mark.timeout(1800)  # a hang would be one: two minutes of a processor, on a busy machine
def test_every_check_of_the_gpu_passes_dry():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "tests.gpu", "--dry", "--only")
    with ThreadPoolExecutor(len(HALVES)) as pool:
        runs = pool.map(
            lambda half: subprocess.run(
                (*command, *half), capture_output=True, text=True, env=environment
            ),
            HALVES,
        )
    passed = []
    for done in runs:
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        ok = [line[0] for line in lines[1:-1] if line[1] == "ok"]
        assert lines[-1] == [str(len(ok)), "passed,", "0", "failed"]
        passed += ok
    assert passed == [*CHECKS]


def test_a_check_that_raises_has_failed(capsys):
    def check(setting):
        raise RuntimeError("no such kernel")

    assert not passes("some.check", check, lambda: None)
    said = capsys.readouterr().out
    assert said.startswith("some.check  FAILED\nTraceback")
    assert "no such kernel" in said
