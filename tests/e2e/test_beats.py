"""Processes that stand still: their beats stop, and they are killed and started again."""

import json
import os
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from lora.beat import RECORD
from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import running


def test_an_engine_that_stands_still_is_killed_and_its_requests_end_as_when_it_dies(
    tmp_path: Path, tiny_model: Path
) -> None:
    with running(
        tmp_path, tiny_model, fake_engine=True, max_model_len=512,
        environment={"FAKE_STEP_S": "0.01", "FAKE_SILENCE_S": "2"},
    ) as stack:  # fmt: skip
        http, engine = stack.tenant("acme").http, stack.pid("engine")
        body = {"model": "base", "prompt": [5] * 20, "max_tokens": 400, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(30):  # the first steps of a size may take long
                next(lines)
            os.kill(engine, signal.SIGSTOP)
            rest = [line for line in lines if line.startswith("data: ")]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert stack.operator.get("/ready").status_code == 503
        stack.wait_ready()
        assert stack.pid("engine") != engine
        assert http.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
        stopped, _ = stack.settled_events(2)
        assert (stopped["stop_cause"], stopped["amount_nanousd"]) == ("engine_failure", 0)
        with closing(sqlite3.connect(stack.data_dir / "chorale.db")) as db:
            assert db.execute("SELECT state FROM holds").fetchall() == [("posted",)] * 2


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
