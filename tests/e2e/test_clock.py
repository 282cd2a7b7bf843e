"""Wall clocks that jump an hour ahead, and then two hours back, under the running product."""

import asyncio
import sqlite3
import struct
import subprocess
import time
from contextlib import closing
from pathlib import Path

from tests import needs
from tests.e2e.bill import Before, check_audit, check_bill, hold_states, load
from tests.e2e.stack import running

ONCE = {"model": "base", "prompt": [5] * 20, "ignore_eos": True, "max_tokens": 1}
LONG = ONCE | {"max_tokens": 200, "stream": True}


def test_a_clock_that_jumps_an_hour_and_two_hours_back_changes_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    library, moved, data_dir = tmp_path / "moved.so", tmp_path / "moved", tmp_path / "data"
    source = Path(__file__).with_name("moved_clock.c")
    compiler = needs.program("cc", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    moved.write_bytes(bytes(8))
    environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(moved), "FAKE_STEP_S": "0.02"}
    settings = {"fake_engine": True, "max_model_len": 512, "environment": environment}

    def num_holds(condition: str) -> int:
        with closing(sqlite3.connect(data_dir / "chorale.db")) as db:
            (count,) = db.execute(f"SELECT count(*) FROM holds WHERE {condition}").fetchone()
            return int(count)

    with running(data_dir, tiny_model, **settings) as stack:
        leasing = stack.tenant("acme", monthly_budget="1")
        before = Before.of(stack)
        limited = stack.tenant("limited", requests_per_minute=3)
        pids = [stack.pid(name) for name in ("engine", "gateway", "fetcher")]
        began_s = time.monotonic()
        answers = [limited.http.post("/v1/completions", json=ONCE) for _ in range(4)]
        for by_s in (3600, -3600):
            asked = {
                "url": "/v1/completions",
                "json": LONG,
                "headers": {"idempotency-key": str(by_s)},
            }
            with leasing.http.stream("POST", **asked) as answer:
                lines = answer.iter_lines()
                begun = next(lines)
                with moved.open("r+b") as file:
                    file.write(struct.pack("l", by_s))
                again = leasing.http.post(**asked)
                assert again.json()["error"]["code"] == "idempotency_key_in_use"
                expired = f"state = 'open' AND expires_at_ms < {(time.time() + by_s) * 1000}"
                # The audit would take a hold that is open past its expiry for one that was lost.
                stack.wait(lambda expired=expired: not num_holds(expired))
                whole = [begun, *lines]
            assert whole[-2] == "data: [DONE]"
            assert leasing.http.post(**asked).text.splitlines() == whole
            seen = asyncio.run(load([leasing], count=10, seed=by_s))
            assert seen.num_errors == 0
            answers.append(limited.http.post("/v1/completions", json=ONCE))
        refused = [answer for answer in answers if answer.status_code == 429]
        refilled = (time.monotonic() - began_s) / 20
        assert 3 <= len(answers) - len(refused) <= 3 + refilled
        assert all(int(answer.headers["retry-after"]) <= 20 for answer in refused)
        check_bill(stack, seen, before)
        assert hold_states(stack).keys() == {"posted"}
        check_audit(stack)
        assert [stack.pid(name) for name in ("engine", "gateway", "fetcher")] == pids
