"""Ranks as processes: sums are added in rank order, and a rank that is gone is not waited for."""

import subprocess
import sys

SIZE = 3


def test_sums_are_the_same_bits_wherever_a_number_lies_and_one_that_leaves_is_noticed(tmp_path):
    """tests.engine.rank_child has the checks that each rank makes."""
    command = [sys.executable, "-m", "tests.engine.rank_child", str(tmp_path / "store"), str(SIZE)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "told\n" * (SIZE - 1))
