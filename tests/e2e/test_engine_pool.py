"""Several engines behind one gateway: the oracle through two, and the death of one of three.

Streams of the dead engine end with an error, other streams as they should, and the bill tells them
apart.
"""

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.meter import TokenMeter
from server.billing.audit.run import audit
from server.billing.tables import holds, usage_events
from server.database.database import DEFAULT_FILE, Database
from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import Stack, Tenant, running
from tests.e2e.test_oracle import check_oracle

NUM_STREAMS = 60
NUM_TOKENS = 100
LOST = "engine-2"


def engines(stack: Stack) -> dict[str, Any]:
    """Return engines by name, as `GET /admin/v1/engines` shows them."""
    answer = stack.operator.get("/admin/v1/engines")
    return {engine["name"]: engine for engine in answer.json()["data"]}


def wait_until_ready(stack: Stack, count: int) -> None:
    """Wait until `count` engines are ready and each has reported its first figures."""

    def are_ready() -> bool:
        found = engines(stack).values()
        states = [engine["state"] for engine in found if engine["figures"]]
        return len(found) == count and states == ["ready"] * count

    stack.wait(are_ready)


def num_generated(stack: Stack) -> dict[str, int]:
    """Return completion tokens by engine, counted since the engine's start."""
    return {name: e["figures"]["completion_tokens"] for name, e in engines(stack).items()}


def test_24_concurrent_requests_through_two_engines_equal_peft(
    tmp_path: Path, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with running(tmp_path / "stack", tiny_model, engines=2) as stack:
        wait_until_ready(stack, 2)
        tenant = stack.tenant("acme")
        for name, folder in tiny_adapters.items():
            tenant.push(name, folder)
        before = num_generated(stack)
        check_oracle(TinyWorld(stack, tenant, tiny_model, tiny_adapters))

        def both_served() -> bool:
            return all(count > before[name] for name, count in num_generated(stack).items())

        stack.wait(both_served)


# ---- one of three dies ----


@dataclass
class Streamed:
    """One streamed answer. error: code of the error with which it ended."""

    request_id: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


async def stream(client: httpx.AsyncClient, number: int, tokens: int, got: Streamed) -> None:
    body = {
        "model": "base", "prompt": [10 + number, *range(10, 40)], "max_tokens": tokens,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                got.error = chunk["error"]["code"]
                continue
            got.request_id = chunk["id"].rpartition("-")[2]
            (choice,) = chunk["choices"]
            got.num_tokens += len(choice["token_ids"])
            got.finish_reason = choice["finish_reason"] or got.finish_reason


async def run_streams(
    stack: Stack, tenant: Tenant, count: int, tokens: int, kill: str | None = None
) -> list[Streamed]:
    """Run streams at once; if `kill` names an engine, kill it when all have begun."""
    headers = {"authorization": f"Bearer {tenant.api_key}"}
    limits = httpx.Limits(max_connections=count)
    streams = [Streamed() for _ in range(count)]
    async with (
        httpx.AsyncClient(
            base_url=stack.base_url, headers=headers, timeout=60, limits=limits
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, got in enumerate(streams):
            group.create_task(stream(client, number, tokens, got))
        if kill:
            while not all(got.num_tokens for got in streams):
                await asyncio.sleep(0.02)
            assert not any(got.finish_reason for got in streams), "all are under way"
            await asyncio.to_thread(stack.kill, kill)
    return streams


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    with running(
        tmp_path_factory.mktemp("pool"), tiny_model, fake_engine=True, engines=3,
        max_model_len=512, environment={"FAKE_STEP_S": "0.05"},
    ) as stack:  # fmt: skip
        wait_until_ready(stack, 3)
        yield stack


def test_one_of_three_engines_that_is_killed_ends_its_own_streams_and_no_others(
    pool: Stack,
) -> None:
    tenant = pool.tenant("acme")
    lost_id = engines(pool)[LOST]["engine_id"]
    streams = asyncio.run(run_streams(pool, tenant, NUM_STREAMS, NUM_TOKENS, kill=LOST))
    meter = TokenMeter.read(pool.data_dir / LOST / "meter")

    # The pool heals: three engines again, with the same names and journals, and all are used.
    wait_until_ready(pool, 3)
    assert engines(pool)[LOST]["engine_id"] == lost_id
    again = asyncio.run(run_streams(pool, tenant, 30, 5))
    assert {got.finish_reason for got in again} == {"length"}
    pool.wait(lambda: all(num_generated(pool).values()))
    pool.settled_events(NUM_STREAMS + len(again))

    database = Database(data_dir=pool.data_dir, exclusive=False)
    query = sa.select(usage_events).filter_by(tenant_id=tenant.tenant_id)
    events = {
        row["request_id"]: row
        for row in database.read_sync(lambda conn: list(conn.execute(query).mappings()))
    }
    assert len(events) == NUM_STREAMS + len(again), "one event a request"
    by_engine = Counter(events[got.request_id]["engine_id"] for got in streams)
    assert len(by_engine) == 3
    assert min(by_engine.values()) >= NUM_STREAMS / 6, "all three served many"

    failed = {got.request_id for got in streams if got.error}
    assert failed == {r.request_id for r in streams if events[r.request_id]["engine_id"] == lost_id}
    for got in streams:
        event = events[got.request_id]
        if got.error:
            assert (got.error, event["stop_cause"]) == ("engine_unavailable", "engine_failure")
            assert (event["is_failed"], event["amount_nanousd"]) == (True, 0)
            assert got.num_tokens <= event["completion_tokens"] < NUM_TOKENS
        else:
            assert (got.finish_reason, event["is_failed"]) == ("length", False)
            assert got.num_tokens == event["completion_tokens"] == NUM_TOKENS
            assert event["amount_nanousd"] > 0
    check_bill(pool, database, list(events.values()), meter[2:])
    database.close()


def test_a_request_whose_engine_died_before_it_was_sent_is_answered_by_another(
    pool: Stack,
) -> None:
    """The engine dies between routing and hold, while the ledger keeps requests waiting."""
    tenant, lost_id = pool.tenant("patient"), engines(pool)[LOST]["engine_id"]
    body = {"model": "base", "prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True}
    before = {event["request_id"] for event in pool.settled_events(0)}
    with (
        contextlib.closing(sqlite3.connect(pool.data_dir / DEFAULT_FILE)) as ledger,
        ThreadPoolExecutor(9) as threads,
    ):
        ledger.execute("BEGIN IMMEDIATE")
        asked = [threads.submit(tenant.http.post, "/v1/completions", json=body) for _ in range(9)]
        pool.wait(lambda: sum(e["requests_here"] for e in engines(pool).values()) == len(asked))
        assert engines(pool)[LOST]["requests_here"]
        pool.kill(LOST)
        pool.wait(lambda: engines(pool)[LOST]["state"] != "ready")
        ledger.rollback()
        answers = [future.result() for future in asked]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    events = [
        event
        for event in pool.settled_events(len(before) + len(answers))
        if event["request_id"] not in before
    ]
    assert [event["completion_tokens"] for event in events] == [5] * len(answers)
    assert lost_id not in {event["engine_id"] for event in events}
    database = Database(data_dir=pool.data_dir, exclusive=False)
    query = sa.select(holds.c.engine_id).filter_by(tenant_id=tenant.tenant_id)
    assert lost_id not in database.read_sync(lambda conn: conn.scalars(query).all())
    database.close()
    wait_until_ready(pool, 3)


def check_bill(
    stack: Stack, database: Database, events: list[Any], cut_step: tuple[int, int]
) -> None:
    """Check that no hold is open, journals and sums add up, and no token was computed uncounted.

    cut_step: (prompt tokens, sampled tokens) of the killed engine's last step, which may not have
    been journaled.
    """
    query = sa.select(holds.c.state).distinct()
    assert set(database.read_sync(lambda conn: conn.scalars(query).all())) == {"posted"}
    folders = [stack.data_dir / name for name in engines(stack)]
    for folder in folders:
        report = database.read_sync(lambda conn, f=folder: audit(conn, engine_dirs=[f]))
        assert report.findings == []
        assert report.incidents == {}
    meters = [TokenMeter.read(folder / "meter") for folder in folders]
    computed = sum(event["prompt_tokens"] - event["cached_tokens"] for event in events)
    sampled = sum(event["completion_tokens"] for event in events)
    beside = (sum(meter[0] for meter in meters) - computed, sum(m[1] for m in meters) - sampled)
    assert beside in ((0, 0), cut_step)
