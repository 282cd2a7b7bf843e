"""Real processes beat by their own loops; tests/e2e/test_billing.py has one that stands still."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lora.beat import RECORD
from tests.e2e.oracle import TinyWorld


def num_beats(pid: int) -> int:
    """Beats so far of a watched process, read from the memory that its supervisor reads."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith("/memfd:beat"):
                number: int = RECORD.unpack(descriptor.read_bytes())[0]
                return number
    raise LookupError(pid)


@pytest.mark.parametrize("name", ["engine", "fetcher"])
def test_an_idle_process_beats_by_its_own_loop(tiny: TinyWorld, name: str) -> None:
    pid = tiny.stack.pid(name)
    before = num_beats(pid)
    tiny.stack.wait(lambda: num_beats(pid) >= before + 2)
    assert tiny.stack.pid(name) == pid, "nobody started it again meanwhile"
