"""Wall clocks that jump an hour ahead, and then two hours back, under the running product."""

import asyncio
import sqlite3
import struct
import subprocess
import time
from contextlib import closing
from pathlib import Path

from server.billing.audit.run import audit
from server.database.database import Database
from tests import needs
from tests.e2e.stack import running
from tests.e2e.test_billing import TENANTS, Seen, check_bill, load

HOUR_S = 3600
ONCE = {"model": "base", "prompt": [5] * 20, "ignore_eos": True, "max_tokens": 1}
LONG = ONCE | {"max_tokens": 200, "stream": True}


def test_a_clock_that_jumps_an_hour_and_two_hours_back_changes_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    library, moved, data_dir = tmp_path / "moved.so", tmp_path / "moved", tmp_path / "data"
    source = Path(__file__).with_name("moved_clock.c")
    subprocess.run([needs.compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    moved.write_bytes(bytes(8))
    environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(moved), "FAKE_STEP_S": "0.02"}
    with running(
        data_dir, tiny_model, fake_engine=True, max_model_len=512, environment=environment
    ) as stack:
        acme, _ = [stack.tenant(name) for name in TENANTS]
        leasing = stack.tenant("leasing", monthly_budget="1")  # its token leases are extended
        limited = stack.tenant("limited", requests_per_minute=3)
        pids = [stack.pid(name) for name in ("engine", "gateway", "fetcher")]

        def num_holds(condition: str) -> int:
            with closing(sqlite3.connect(data_dir / "chorale.db")) as db:
                return int(
                    db.execute(f"SELECT count(*) FROM holds WHERE {condition}").fetchone()[0]
                )

        def jump(by_s: int) -> Seen:
            keyed = {"idempotency-key": f"moved by {by_s} s"}
            with (
                acme.http.stream("POST", "/v1/completions", json=LONG, headers=keyed) as first,
                leasing.http.stream("POST", "/v1/completions", json=LONG) as second,
            ):
                streams = [answer.iter_lines() for answer in (first, second)]
                begun = [next(lines) for lines in streams]
                with moved.open("r+b") as file:
                    file.write(struct.pack("l", by_s))
                again = acme.http.post("/v1/completions", json=LONG, headers=keyed)
                assert again.json()["error"]["code"] == "idempotency_key_in_use"
                now_ms = (time.time() + by_s) * 1000
                # The audit would take a hold that is open past its expiry for one that was lost.
                stack.wait(lambda: not num_holds(f"state = 'open' AND expires_at_ms < {now_ms}"))
                whole = [[line, *lines] for line, lines in zip(begun, streams, strict=True)]
            assert [lines[-2] for lines in whole] == ["data: [DONE]"] * 2
            again = acme.http.post("/v1/completions", json=LONG, headers=keyed)
            assert again.text.splitlines() == whole[0]
            return asyncio.run(load(stack, count=10, seed=by_s))

        began_s = time.monotonic()
        answers = [limited.http.post("/v1/completions", json=ONCE) for _ in range(4)]
        for by_s in (HOUR_S, -HOUR_S):
            seen = jump(by_s)
            assert seen.num_errors == 0
            answers.append(limited.http.post("/v1/completions", json=ONCE))
        check_bill(stack, seen)
        assert num_holds("state <> 'posted'") == 0
        assert [stack.pid(name) for name in ("engine", "gateway", "fetcher")] == pids
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) <= 20 for answer in refused)
        refilled = (time.monotonic() - began_s) / 20
        assert 3 <= len(answers) - len(refused) <= 3 + refilled
        with closing(Database(data_dir=data_dir, exclusive=False)) as database:
            report = database.read_sync(lambda conn: audit(conn, engine_dirs=[data_dir / "engine"]))
        assert not report.findings
        assert not report.incidents
