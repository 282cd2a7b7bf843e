"""A pool that grows and shrinks while it serves, loses an engine, and starts again with fewer."""

import asyncio
import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.leaving import is_settled
from engine.steps.meter import TokenMeter
from server.billing.audit.run import audit
from server.billing.tables import usage_events
from server.database.database import Database
from server.pool.control_files import members_file, wanted_file
from tests.e2e.stack import Stack, Tenant, running
from tests.e2e.streams import Streamed, engines, num_generated, run_streams, wait_until_ready

SETTINGS: dict[str, Any] = {
    "fake_engine": True, "max_num_seqs": 4, "max_model_len": 512,
    "environment": {"FAKE_STEP_S": "0.02"},
}  # fmt: skip
BODY = {"model": "base", "max_tokens": 60, "ignore_eos": True}
LOST = "engine-2"
NUM_STREAMS, NUM_TOKENS = 6, 200


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """A pool of two engines with room for a third; its last test lets the power fail."""
    folder = tmp_path_factory.mktemp("pool")
    with running(folder, tiny_model, engines=2, max_engines=3, **SETTINGS) as stack:
        wait_until_ready(stack, 2)
        yield stack


def states(stack: Stack) -> dict[str, str]:
    """Return the states of the engines that the gateway knows, by name."""
    return {name: engine["state"] for name, engine in engines(stack).items()}


def holds_by_state(stack: Stack) -> dict[str, int]:
    url = f"file:{stack.data_dir / 'chorale.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(url, uri=True)) as database:
        return dict(database.execute("SELECT state, count(*) FROM holds GROUP BY state"))


@dataclass
class Load:
    """Workers that send one request after the other. answers: status and body; 0: no answer."""

    tenant: Tenant
    answers: list[tuple[int, Any]] = field(default_factory=list)
    num_workers: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)

    def set_workers(self, count: int) -> None:
        """Set the number of workers. New ones begin at once; others end after their next answer."""
        self.num_workers = count
        for number in range(len(self._threads), count):
            self._threads.append(threading.Thread(target=self._work, args=(number,)))
            self._threads[-1].start()

    def _work(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self.tenant.api_key}"}
        with httpx.Client(
            base_url=self.tenant.stack.base_url, headers=headers, timeout=60
        ) as client:
            for turn in range(10_000):
                if number >= self.num_workers:
                    return
                body = BODY | {"prompt": [10 + number, 10 + turn % 100, 5]}
                try:
                    answer = client.post("/v1/completions", json=body)
                    self.answers.append((answer.status_code, answer.json()))
                except (httpx.HTTPError, ValueError) as error:
                    self.answers.append((0, error))

    def stop(self) -> None:
        self.num_workers = 0
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def loaded(tenant: Tenant) -> Iterator[Load]:
    load = Load(tenant)
    try:
        yield load
    finally:
        load.stop()


def test_a_pool_grows_under_load_and_shrinks_again_and_no_request_notices(pool: Stack) -> None:
    with loaded(pool.tenant("grows")) as load:
        load.set_workers(11)
        pool.wait(lambda: states(pool).get("engine-3") == "ready")
        pool.wait(lambda: num_generated(pool)["engine-3"] > 0)
        load.set_workers(5)
        engine_pid = pool.pid("engine-3")
        wanted_file(pool.data_dir).write(2)
        pool.wait(lambda: states(pool)["engine-3"] == "leaving")
        pool.wait(lambda: pool.pid("engine-3") != engine_pid)
        # A stand-in follows the engine and stays a member: holds there may still be open.
        pool.wait(lambda: is_retired(pool.pid("engine-3")))
        pool.wait(lambda: states(pool)["engine-3"] == "leaving")
        num_answers = len(load.answers)
        pool.wait(lambda: len(load.answers) > num_answers + 10)
    assert [answer for answer in load.answers if answer[0] != 200] == []
    events = pool.settled_events(len(load.answers))
    assert len(events) == len(load.answers)
    assert {event["completion_tokens"] for event in events} == {BODY["max_tokens"]}
    assert len({event["engine_id"] for event in events}) == 3, "all of them served"
    pool.wait(lambda: holds_by_state(pool) == {"posted": len(events)})
    pool.wait(lambda: engines(pool)["engine-3"]["figures"]["unsettled_records"] == 0)


def is_retired(pid: int) -> bool:
    return b"engine.retired" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_engine_that_is_killed_ends_its_own_streams_and_no_others(pool: Stack) -> None:
    tenant, before = pool.tenant("loses"), len(pool.settled_events(0))
    lost_id = engines(pool)[LOST]["engine_id"]
    lose = partial(pool.kill, LOST)
    streams = asyncio.run(run_streams(pool, tenant, NUM_STREAMS, NUM_TOKENS, lose))
    cut_step = TokenMeter.read(pool.data_dir / LOST / "meter")[2:]
    # The pool heals: the engine is back under its name and with its journal, and is used.
    pool.wait(lambda: states(pool)[LOST] == "ready")
    assert engines(pool)[LOST]["engine_id"] == lost_id
    again = asyncio.run(run_streams(pool, tenant, NUM_STREAMS, 5))
    assert {got.finish_reason for got in again} == {"length"}
    pool.wait(lambda: num_generated(pool)[LOST])
    pool.settled_events(before + len(streams) + len(again))
    check_bill(pool, streams, lost_id, cut_step)


def check_bill(
    stack: Stack, streams: list[Streamed], lost_id: str, cut_step: tuple[int, ...]
) -> None:
    """Check that streams of the lost engine ended with an error and are free, and others are not.

    No token was computed uncounted.   cut_step: (prompt tokens, sampled tokens) of the killed
    engine's last step, which may not have been journaled.
    """
    folders = [stack.data_dir / name for name in engines(stack)]
    with contextlib.closing(Database(data_dir=stack.data_dir, exclusive=False)) as database:
        rows = database.read_sync(
            lambda conn: list(conn.execute(sa.select(usage_events)).mappings())
        )
        report = database.read_sync(lambda conn: audit(conn, engine_dirs=folders))
    assert (report.findings, report.incidents) == ([], {})
    assert set(holds_by_state(stack)) == {"posted"}
    events = {row["request_id"]: row for row in rows}
    assert len(events) == len(rows), "one event a request"
    assert len({events[got.request_id]["engine_id"] for got in streams}) == 2, "both served"
    for got in streams:
        event = events[got.request_id]
        assert bool(got.error) == (event["engine_id"] == lost_id)
        if got.error:
            assert (got.error, event["stop_cause"]) == ("engine_unavailable", "engine_failure")
            assert (event["is_failed"], event["amount_nanousd"]) == (True, 0)
            assert got.num_tokens <= event["completion_tokens"] < NUM_TOKENS
        else:
            assert (got.finish_reason, event["is_failed"]) == ("length", False)
            assert got.num_tokens == event["completion_tokens"] == NUM_TOKENS
            assert event["amount_nanousd"] > 0
    meters = [TokenMeter.read(folder / "meter") for folder in folders]
    computed = sum(event["prompt_tokens"] - event["cached_tokens"] for event in rows)
    sampled = sum(event["completion_tokens"] for event in rows)
    beside = (sum(meter[0] for meter in meters) - computed, sum(m[1] for m in meters) - sampled)
    assert beside in ((0, 0), cut_step)


def test_what_a_smaller_pool_does_not_start_again_is_billed_all_the_same(
    pool: Stack, tiny_model: Path
) -> None:
    """The power fails while two engines serve, and only one is started again."""
    tenant, before = pool.tenant("unlucky"), len(pool.settled_events(0))
    streams = asyncio.run(run_streams(pool, tenant, NUM_STREAMS, 400, kill=pool.die))
    assert {got.error for got in streams} == {"cut off"}
    with running(pool.data_dir, tiny_model, engines=1, **SETTINGS) as stack:
        stack.wait(lambda: holds_by_state(stack) == {"posted": before + NUM_STREAMS})
        found = states(stack)
        assert (found["engine"], found[LOST]) == ("ready", "leaving")
        ours = {got.request_id for got in streams}
        events = [e for e in stack.settled_events(before) if e["request_id"] in ours]
        assert Counter(event["stop_cause"] for event in events) == {"engine_failure": len(streams)}
        assert len({event["engine_id"] for event in events}) == 2
        num_received = sum(got.num_tokens for got in streams)
        assert sum(event["completion_tokens"] for event in events) >= num_received
        assert {event["amount_nanousd"] for event in events} == {0}
        answer = stack.client(tenant.api_key).post("/v1/completions", json=BODY | {"prompt": [5]})
        assert answer.status_code == 200
        names = [member.name for member in members_file(stack.data_dir).read()]
        assert set(names) >= {"engine", LOST}
        assert not is_settled(stack.data_dir / LOST), "a hold might still be open"
