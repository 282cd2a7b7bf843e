"""Real processes beat by their own loops; tests/e2e/test_billing.py has one that stands still."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lora.beat import RECORD
from tests.e2e.stack import Stack


def num_beats(pid: int) -> int:
    """Beats so far of a watched process, read from the memory that its supervisor reads."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith("/memfd:beat"):
                number: int = RECORD.unpack(descriptor.read_bytes())[0]
                return number
    raise LookupError(pid)


@pytest.mark.parametrize("name", ["engine", "fetcher"])
def test_an_idle_process_beats_by_its_own_loop(scripted: Stack, name: str) -> None:
    pid = scripted.pid(name)
    before = num_beats(pid)
    scripted.wait(lambda: num_beats(pid) >= before + 2)
    assert scripted.pid(name) == pid, "nobody started it again meanwhile"
