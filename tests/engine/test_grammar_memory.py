"""The memory of compiled grammars, in a process of its own."""

import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "demo" / "model" / "tokenizer.json"
SHARE_BYTES = 16 << 20


def test_a_tenants_grammars_take_no_more_memory_than_twice_its_share():
    """Twenty of them would take 100 MB, and few have room in the share of 16 MiB."""
    command = [sys.executable, "-m", "tests.engine.grammar_memory_child", str(TOKENIZER)]
    done = subprocess.run(
        [*command, str(4 * SHARE_BYTES), "20"], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 2 * SHARE_BYTES
