"""Ranks as processes: sums are added in rank order, and a rank that is gone is not waited for."""

import subprocess
import sys

SIZE = 3


def test_sums_are_the_same_bits_wherever_a_number_lies_and_one_that_leaves_is_noticed(tmp_path):
    """tests.engine.rank_child has the checks that each rank makes."""
    command = [sys.executable, "-m", "tests.engine.rank_child", str(tmp_path / "store")]
    children = [
        subprocess.Popen([*command, str(i), str(SIZE)], stdout=subprocess.PIPE, text=True)
        for i in range(SIZE)
    ]
    said = [child.communicate(timeout=100)[0] for child in children]
    assert [child.returncode for child in children] == [0] * SIZE
    assert said == ["told\n"] * (SIZE - 1) + [""]
