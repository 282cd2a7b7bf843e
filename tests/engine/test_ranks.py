"""Ranks as processes: sums in their order, and nobody waits for one that is gone."""

import subprocess
import sys

SIZE = 3


def test_sums_are_the_same_bits_wherever_a_number_lies_and_one_that_leaves_is_noticed(tmp_path):
    """What each rank checks is in rank_child."""
    command = [sys.executable, "-m", "tests.engine.rank_child", str(tmp_path / "store")]
    children = [
        subprocess.Popen([*command, str(i), str(SIZE)], stdout=subprocess.PIPE, text=True)
        for i in range(SIZE)
    ]
    said = [child.communicate(timeout=100)[0] for child in children]
    assert [child.returncode for child in children] == [0] * SIZE
    assert said == ["told\n"] * (SIZE - 1) + [""]
