"""Billed tokens equal generated tokens, whatever clients do and whatever is killed.

The runner's meter shares no code with the journal; the export comes from the ledger.
"""

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

import httpx
import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from bench.process_tree import find_children
from engine.steps.meter import TokenMeter
from engine.wire.messages import PROOF_TENANT
from server.billing.audit.run import audit
from server.billing.tables import usage_events
from server.database.database import Database
from server.launch.engine_folders import engine_folders
from tests.e2e.stack import Stack, Tenant
from tests.e2e.streams import Streamed

STEM = list(range(10, 60))
"""Tokens with a part of which many prompts begin, so that cached tokens occur in the bill."""
Kill = Literal["gateway", "engine", "rank", "stop"]
"""The process that is killed; stop: the engine stands still until its supervisor kills it."""


@dataclass
class Seen:
    """Tokens that clients received, and the step that each kill cut off.

    tokens: number of tokens by answer id.   cut_steps: (prompt tokens, sampled tokens) of the last
    step that each killed engine computed.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    num_errors: int = 0
    cut_steps: list[tuple[int, int]] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, tenant: Tenant, seen: Seen, chance: random.Random) -> None:
    """Send one streamed completion; in two of three cases the client leaves early."""
    body = {
        "model": chance.choice(["base", *tenant.adapters]),
        "prompt": [
            *STEM[: chance.randrange(len(STEM))],
            *[chance.randrange(4, 250) for _ in range(chance.randrange(1, 60))],
        ],
        "max_tokens": chance.randrange(1, 60),
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    leave_after = chance.choice([None, None, 0, 1, 5, 20])
    asked = {"json": body, "headers": tenant.headers}
    try:
        async with client.stream("POST", "/v1/completions", **asked) as answer:
            if answer.status_code != 200:
                seen.num_errors += 1
                return
            chunks = 0
            async for line in answer.aiter_lines():
                if leave_after is not None and chunks >= leave_after:
                    return
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    seen.num_errors += 1
                    return
                count = len(chunk["choices"][0]["token_ids"])
                seen.tokens[chunk["id"]] = seen.tokens.get(chunk["id"], 0) + count
                chunks += 1
    except httpx.TransportError:
        seen.num_errors += 1


async def ask_and_kill(
    client: httpx.AsyncClient, tenant: Tenant, kill: Kill, seen: Seen, chance: random.Random
) -> None:
    """Kill a process in the middle of a long stream, so that the kill always hits a request."""
    body = {"model": "base", "max_tokens": 500, "stream": True, "ignore_eos": True}
    body["prompt"] = [chance.randrange(4, 250), chance.randrange(4, 250)]
    stack, asked = tenant.stack, {"json": body, "headers": tenant.headers}
    with suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", **asked) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            await asyncio.to_thread(_kill, stack, kill, seen)
            assert "data: [DONE]" not in [line async for line in lines], "it ended before the kill"


async def load(tenants: Sequence[Tenant], count: int, seed: int, kill: Kill | None = None) -> Seen:
    """Send many requests of tenants of one stack at once; in the middle of them kill a process."""
    seen, chance, stack = Seen(), random.Random(seed), tenants[0].stack
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=30, limits=limits) as client:
        tasks = []
        for i in range(count):
            tenant = tenants[i % len(tenants)]
            tasks.append(asyncio.create_task(ask(client, tenant, seen, random.Random(seed + i))))
            await asyncio.sleep(chance.random() * 0.02)
            if kill and i == count // 2:
                tasks.append(asyncio.create_task(ask_and_kill(client, tenant, kill, seen, chance)))
        await asyncio.gather(*tasks)
    return seen


def _kill(stack: Stack, kill: Kill, seen: Seen) -> None:
    """Kill a process; note the step of an engine that it cuts off."""
    engine = stack.pid("engine")
    if kill == "rank":
        kill_rank(stack)
    elif kill == "stop":
        os.kill(engine, signal.SIGSTOP)
    else:
        stack.kill(kill)
    if kill != "gateway":
        seen.cut_steps.append(TokenMeter.read(meter_of(stack))[2:])
    if kill == "stop":
        stack.wait(lambda: stack.pid("engine") != engine)


def kill_rank(stack: Stack) -> None:
    """SIGKILL the second rank of the model, and wait until the engine has ended, too."""
    engine = stack.pid("engine")
    (rank,) = find_children(engine, "engine.rank_process")
    os.kill(rank, signal.SIGKILL)
    stack.wait(lambda: not Path(f"/proc/{engine}/fd").exists())


def quiet(stack: Stack) -> list[dict]:
    """Return all events, once the engine is idle and the ledger has every request that it ended.

    The engine's figures are up to a quarter of a second old. Figures that are seen after an answer
    and count one step more than the figures before are younger than that answer.
    """

    def figures() -> tuple[float, ...]:
        """Return the number of steps, of running and of waiting requests, and of records to settle.

        Raises LookupError if there are no figures yet.
        """
        lines = stack.operator.get("/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("steps_total", "running", "waiting", "unsettled_records")
        labels = '{base="base",engine="engine"}'
        return tuple(float(found[f"chorale_{name}{labels}"]) for name in names)

    def ask_once() -> None:
        body = {"model": "base", "prompt": [5], "max_tokens": 1}
        assert stack.tenants[0].http.post("/v1/completions", json=body).status_code == 200

    stack.wait_ready()
    stack.wait(figures)
    ask_once()
    num_steps = figures()[0]
    ask_once()
    stack.wait(lambda: figures()[0] > num_steps and figures()[1:] == (0, 0, 0))
    text = stack.operator.get("/admin/v1/usage/export?format=jsonl").text
    entries = [json.loads(line) for line in text.splitlines()]
    return [entry for entry in entries if entry["kind"] == "usage"]


def hold_states(stack: Stack, tenant_id: str = "%") -> dict[str, int]:
    """Return the number of holds in each state, of one tenant or of all."""
    query = "SELECT state, count(*) FROM holds WHERE tenant_id LIKE ? GROUP BY state"
    with closing(sqlite3.connect(stack.data_dir / "chorale.db")) as db:
        return dict(db.execute(query, [tenant_id]))


def meter_of(stack: Stack) -> Path:
    return stack.data_dir / "engine" / "meter"


@dataclass
class Before:
    """Sums of what was billed, and of what was computed, before a load."""

    request_ids: set[str]
    meter: tuple[int, int, int, int]

    @classmethod
    def of(cls, stack: Stack) -> "Before":
        billed = {event["request_id"] for event in quiet(stack)}
        return cls(billed, TokenMeter.read(meter_of(stack)))


def check_bill(stack: Stack, seen: Seen, before: Before) -> list[dict]:
    """Check that the exported tokens are the runner's, and that no client got more than counted.

    Returns the events of the load.
    """
    events = [event for event in quiet(stack) if event["request_id"] not in before.request_ids]
    counted = {event["request_id"]: event["completion_tokens"] for event in events}
    assert len(counted) == len(events), "one event a request"
    meter = TokenMeter.read(meter_of(stack))
    computed = sum(event["prompt_tokens"] - event["cached_tokens"] for event in events)
    missing = (
        meter[0] - before.meter[0] - computed,
        meter[1] - before.meter[1] - sum(counted.values()),
    )
    assert missing in (possible := _sums_of_some(seen.cut_steps)), (missing, possible)
    for answer_id, count in seen.tokens.items():
        assert count <= counted[answer_id.rpartition("-")[2]]
    for event in events:
        is_free = event["finish_reason"] == "error" or event["prompt_tokens"] == 0
        # A failed request is free: the engine wrote its end and died before it sent the answer.
        is_free |= event["is_failed"] or event["tenant_id"] == PROOF_TENANT
        assert (event["amount_nanousd"] == 0) == is_free
    return events


def _sums_of_some(cut_steps: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return what the journal may lack: a step that was computed and not journaled when the engine
    died was seen by no client, so whole steps may be missing, one per kill, and nothing else.
    """
    return [
        tuple(map(sum, zip((0, 0), *cut, strict=True)))
        for size in range(len(cut_steps) + 1)
        for cut in combinations(cut_steps, size)
    ]


def check_audit(stack: Stack) -> None:
    """Check that the audit of ledger and journals finds nothing, and that no incident is known."""
    folders = engine_folders(stack.data_dir)
    with closing(Database(data_dir=stack.data_dir, exclusive=False)) as database:
        report = database.read_sync(lambda conn: audit(conn, engine_dirs=folders))
    assert (report.findings, report.incidents) == ([], {})


def check_streams(
    stack: Stack,
    streams: Sequence[Streamed],
    num_tokens: int,
    lost: Mapping[str, str | None],
    cut_steps: Sequence[tuple[int, ...]],
) -> dict[str, RowMapping]:
    """Check that streams of an engine that died under them ended with an error and are free, and
    that others are not. No token was computed uncounted. Returns all usage events by request.

    lost: by request, the id of the engine that died, or None.   cut_steps: (prompt tokens, sampled
    tokens) of the last steps of killed engines, which may not have been journaled.
    """
    check_audit(stack)
    with closing(Database(data_dir=stack.data_dir, exclusive=False)) as database:
        rows = database.read_sync(
            lambda conn: conn.execute(sa.select(usage_events)).mappings().all()
        )
    assert hold_states(stack).keys() == {"posted"}
    events = {row["request_id"]: row for row in rows}
    assert len(events) == len(rows), "one event a request"
    for got in streams:
        event = events[got.request_id]
        assert bool(got.error) == (event["engine_id"] == lost[got.request_id])
        if got.error:
            assert (got.error, event["stop_cause"]) == ("engine_unavailable", "engine_failure")
            assert (event["is_failed"], event["amount_nanousd"]) == (True, 0)
            assert got.num_tokens <= event["completion_tokens"] < num_tokens
        else:
            assert (got.finish_reason, event["is_failed"]) == ("length", False)
            assert got.num_tokens == event["completion_tokens"] == num_tokens
            assert event["amount_nanousd"] > 0
    meters = [TokenMeter.read(folder / "meter") for folder in engine_folders(stack.data_dir)]
    computed = sum(event["prompt_tokens"] - event["cached_tokens"] for event in rows)
    sampled = sum(event["completion_tokens"] for event in rows)
    beside = (sum(meter[0] for meter in meters) - computed, sum(m[1] for m in meters) - sampled)
    assert beside in _sums_of_some(cut_steps)
    return events
