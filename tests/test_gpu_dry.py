"""The GPU's checks run dry, all of them, and say so; what fails is seen in the exit status."""

import os
import subprocess
import sys

from tests.gpu.__main__ import passes
from tests.gpu.checks import CHECKS


def test_every_check_of_the_gpu_passes_dry():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "tests.gpu", "--dry")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{len(CHECKS)} passed, 0 failed"
    assert [line.split()[0] for line in lines[1:-1] if line.split()[1] == "ok"] == [*CHECKS]


def test_a_check_that_raises_has_failed(capsys):
    def check(setting):
        raise RuntimeError("no such kernel")

    assert not passes("some.check", check, lambda: None)
    said = capsys.readouterr().out
    assert said.startswith("some.check  FAILED\nTraceback")
    assert "no such kernel" in said
