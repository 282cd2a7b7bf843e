"""Billed tokens equal generated tokens: under disconnects, and when gateway or engine are killed.

The runner's meter shares no code with the journal; the export comes from the ledger.
"""

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import httpx
import pytest

from engine.messages import PROOF_TENANT
from engine.meter import TokenMeter
from tests.e2e.stack import Stack, Tenant, running
from tests.engine.fake_engine import POISON

STEM = list(range(10, 60))
"""Tokens with a part of which many prompts begin, so that cached tokens occur in the bill."""
TENANTS = ("acme", "globex")
"""Tenants that send a load; a test may have others beside them."""


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
    headers = {"authorization": f"Bearer {tenant.api_key}"}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
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
    client: httpx.AsyncClient, stack: Stack, kill: str, seen: Seen, chance: random.Random
) -> None:
    """Kill a process in the middle of a long stream, so that the kill always hits a request."""
    body = {"model": "base", "max_tokens": 500, "stream": True, "ignore_eos": True}
    body["prompt"] = [chance.randrange(4, 250), chance.randrange(4, 250)]
    headers = {"authorization": f"Bearer {stack.tenants[0].api_key}"}
    with suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            kill_rank(stack) if kill == "rank" else stack.kill(kill)
            if kill != "gateway":
                seen.cut_steps.append(TokenMeter.read(meter_of(stack))[2:])
            assert "data: [DONE]" not in [line async for line in lines], "it ended before the kill"


async def load(stack: Stack, count: int, seed: int, kill: str | None = None) -> Seen:
    """Send many requests at once; in the middle of them kill one process."""
    seen, chance = Seen(), random.Random(seed)
    tenants = stack.tenants[: len(TENANTS)]
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=30, limits=limits) as client:
        tasks = []
        for i in range(count):
            tenant = tenants[i % len(tenants)]
            tasks.append(asyncio.create_task(ask(client, tenant, seen, random.Random(seed + i))))
            await asyncio.sleep(chance.random() * 0.02)
            if kill and i == count // 2:
                tasks.append(asyncio.create_task(ask_and_kill(client, stack, kill, seen, chance)))
        await asyncio.gather(*tasks)
    return seen


def kill_rank(stack: Stack) -> None:
    """SIGKILL the second rank of the model, and wait until the engine has ended, too."""
    engine = stack.pid("engine")
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    (rank,) = [
        int(pid)
        for pid in children
        if "engine.rank_process" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
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


def meter_of(stack: Stack) -> Path:
    return stack.data_dir / "engine" / "meter"


def check_bill(stack: Stack, seen: Seen) -> None:
    """Check that the exported tokens are the runner's, and that no client got more than counted."""
    events = quiet(stack)
    counted = {event["request_id"]: event["completion_tokens"] for event in events}
    assert len(counted) == len(events), "one event a request"
    prompt, sampled, _, _ = TokenMeter.read(meter_of(stack))
    computed = sum(event["prompt_tokens"] - event["cached_tokens"] for event in events)
    missing = (prompt - computed, sampled - sum(counted.values()))
    # A step that was computed and not journaled when the engine died was seen by no client: whole
    # steps may be missing, one per kill, and nothing else.
    possible = [
        tuple(map(sum, zip((0, 0), *cut, strict=True)))
        for size in range(len(seen.cut_steps) + 1)
        for cut in combinations(seen.cut_steps, size)
    ]
    assert missing in possible
    for answer_id, count in seen.tokens.items():
        assert count <= counted[answer_id.rpartition("-")[2]]
    for event in events:
        is_free = event["finish_reason"] == "error" or event["prompt_tokens"] == 0
        # A failed request is free: the engine wrote its end and died before it sent the answer.
        is_free |= event["is_failed"] or event["tenant_id"] == PROOF_TENANT
        assert (event["amount_nanousd"] == 0) == is_free


@contextmanager
def fake_engine(folder: Path, model: Path, adapters: dict[str, Path]) -> Iterator[Stack]:
    """Run a stack without a model, all else real: cheap enough to kill again and again."""
    with running(
        folder, model, fake_engine=True, max_model_len=512,
        environment={"FAKE_STEP_S": "0.002"},
    ) as stack:  # fmt: skip
        for name in TENANTS:
            tenant = stack.tenant(name)
            tenant.push("alpha", adapters["alpha"])
            tenant.push("gamma", adapters["gamma"])
        yield stack


@pytest.fixture
def fake_stack(tmp_path: Path, tiny_model: Path, tiny_adapters: dict[str, Path]) -> Iterator[Stack]:
    """A stack for a test that kills in the middle of requests."""
    with fake_engine(tmp_path, tiny_model, tiny_adapters) as stack:
        yield stack


@pytest.fixture(scope="module")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> Iterator[Stack]:
    """A stack for tests that let every request end; the bill has the requests of all of them."""
    with fake_engine(tmp_path_factory.mktemp("shared"), tiny_model, tiny_adapters) as stack:
        yield stack


def test_the_bill_is_the_meter_after_random_disconnects(shared_stack: Stack) -> None:
    seen = asyncio.run(load(shared_stack, count=150, seed=1))
    assert seen.num_errors == 0
    check_bill(shared_stack, seen)
    assert sum(event["cached_tokens"] for event in quiet(shared_stack)) > 0


def test_the_bill_is_exact_after_the_gateway_is_killed(fake_stack: Stack) -> None:
    seen = asyncio.run(load(fake_stack, count=100, seed=2, kill="gateway"))
    fake_stack.wait_ready()
    asyncio.run(load(fake_stack, count=10, seed=3))
    check_bill(fake_stack, seen)


def test_the_bill_is_exact_after_the_engine_is_killed_again_and_again(fake_stack: Stack) -> None:
    seen = Seen()
    for round_number in range(3):
        fake_stack.wait_ready()
        more = asyncio.run(load(fake_stack, count=60, seed=10 + round_number, kill="engine"))
        seen.tokens |= more.tokens
        seen.cut_steps += more.cut_steps
    check_bill(fake_stack, seen)
    events = quiet(fake_stack)
    unpaid = [event for event in events if event["stop_cause"] == "engine_failure"]
    assert len(unpaid) >= 3, "each kill hit somebody"
    assert all(event["amount_nanousd"] == 0 for event in unpaid)


def test_the_bill_is_exact_after_a_rank_of_the_model_is_killed(
    tmp_path: Path, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with running(tmp_path, tiny_model, tensor_parallel_size=2) as stack:
        for name in TENANTS:
            stack.tenant(name).push("alpha", tiny_adapters["alpha"])
        seen = asyncio.run(load(stack, count=40, seed=5, kill="rank"))
        stack.wait_ready()
        after = asyncio.run(load(stack, count=10, seed=6))
        assert after.num_errors == 0, "the ranks are back"
        check_bill(stack, seen)
        unpaid = [e for e in quiet(stack) if e["stop_cause"] == "engine_failure"]
        assert unpaid
        assert all(event["amount_nanousd"] == 0 for event in unpaid)
        # An idle engine notices the loss of a rank, too, before a request finds it.
        kill_rank(stack)
        stack.wait(lambda: stack.operator.get("/ready").status_code == 503)
        stack.wait_ready()
        assert asyncio.run(load(stack, count=2, seed=7)).num_errors == 0


def test_no_hold_stays_open_when_everything_has_ended(shared_stack: Stack) -> None:
    asyncio.run(load(shared_stack, count=40, seed=4))
    events = quiet(shared_stack)
    with closing(sqlite3.connect(shared_stack.data_dir / "chorale.db")) as db:
        states = dict(db.execute("SELECT state, count(*) FROM holds GROUP BY state").fetchall())
    held = [event for event in events if event["tenant_id"] != PROOF_TENANT]
    assert states == {"posted": len(held)}


def test_a_real_model_bills_exactly_what_its_runner_sampled(
    tmp_path: Path, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with running(tmp_path, tiny_model) as stack:
        tenant = stack.tenant("acme")
        tenant.push("alpha", tiny_adapters["alpha"])
        seen = asyncio.run(load(stack, count=60, seed=7))
        assert seen.num_errors == 0
        check_bill(stack, seen)


def test_a_killed_engine_ends_its_streams_within_a_second_and_is_back_by_itself(
    fake_stack: Stack,
) -> None:
    async def run() -> None:
        tenant = fake_stack.tenants[0]
        async with httpx.AsyncClient(base_url=fake_stack.base_url, timeout=30) as client:
            body = {"model": "base", "prompt": [5] * 20, "max_tokens": 400, "stream": True}
            headers = {"authorization": f"Bearer {tenant.api_key}"}
            async with client.stream(
                "POST", "/v1/completions", json=body | {"ignore_eos": True}, headers=headers
            ) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                fake_stack.kill("engine")
                rest = await asyncio.wait_for(_all(lines), 10)
            error = json.loads([line for line in rest if line.startswith("data: ")][-1][6:])
            assert error["error"]["code"] == "engine_unavailable"
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code in (200, 503)
            if refused.status_code == 503:
                assert int(refused.headers["retry-after"]) >= 1

    asyncio.run(run())
    fake_stack.wait_ready()
    answer = fake_stack.tenants[0].http.post(
        "/v1/completions", json={"model": "base", "prompt": "x"}
    )
    assert answer.status_code == 200


def test_a_request_that_killed_the_engine_twice_is_not_tried_a_third_time(
    fake_stack: Stack,
) -> None:
    http = fake_stack.tenants[0].http
    poison = {"model": "base", "prompt": [POISON, 7], "max_tokens": 3}
    for _ in range(2):
        fake_stack.wait_ready()
        assert http.post("/v1/completions", json=poison).status_code == 503
    fake_stack.wait_ready()
    third = http.post("/v1/completions", json=poison)
    assert (third.status_code, third.json()["error"]["code"]) == (400, "request_quarantined")
    harmless = poison | {"prompt": [7, POISON]}
    assert http.post("/v1/completions", json=harmless).status_code == 200


def test_a_restarted_gateway_knows_at_once_where_adapters_are(shared_stack: Stack) -> None:
    tenant = shared_stack.tenants[0]
    body = {"model": "alpha", "prompt": [7], "max_tokens": 1}
    assert tenant.http.post("/v1/completions", json=body).status_code == 200
    shared_stack.kill("gateway")
    shared_stack.wait_ready()
    assert tenant.http.get("/v1/adapters/alpha").json()["latest"]["tier"] == "device"


def test_a_request_whose_gateway_was_killed_runs_again_under_its_key(shared_stack: Stack) -> None:
    """The key would else be in use for as long as a request may take, which is ten minutes."""
    tenant = shared_stack.tenant("repeating")
    body = {"model": "base", "prompt": [7], "max_tokens": 200, "ignore_eos": True, "stream": True}
    key = {"Idempotency-Key": "killed"}
    with (
        suppress(httpx.TransportError),
        tenant.http.stream("POST", "/v1/completions", json=body, headers=key) as answer,
    ):
        for number, _ in enumerate(answer.iter_lines()):
            if number == 0:
                shared_stack.kill("gateway")
    shared_stack.wait_ready()

    def again() -> httpx.Response:
        return tenant.http.post("/v1/completions", json=body, headers=key)

    shared_stack.wait(lambda: again().status_code == 200)
    assert again().text.endswith("data: [DONE]\n\n")


def test_clients_that_hang_up_give_their_seats_back(shared_stack: Stack) -> None:
    """Clients may leave at any moment; a seat that leaked would lead to 429 for ever."""
    tenant = shared_stack.tenant("two-seats", max_concurrency=2)

    async def hang_up(client: httpx.AsyncClient, stream: bool, after_s: float) -> None:
        body = {"model": "base", "prompt": [7] * 30, "max_tokens": 200, "ignore_eos": True}
        headers = {"authorization": f"Bearer {tenant.api_key}"}
        with suppress(httpx.TimeoutException):
            await client.post(
                "/v1/completions", json=body | {"stream": stream}, headers=headers, timeout=after_s
            )

    async def storm() -> None:
        async with httpx.AsyncClient(base_url=shared_stack.base_url) as client:
            for i in range(40):
                await hang_up(client, stream=bool(i % 2), after_s=0.002 * (i % 20 + 1))

    asyncio.run(storm())
    body = {"model": "base", "prompt": [7], "max_tokens": 1}
    shared_stack.wait(lambda: tenant.http.post("/v1/completions", json=body).status_code == 200)

    def both_seats() -> bool:
        with ThreadPoolExecutor(2) as pool:
            long = body | {"max_tokens": 60, "ignore_eos": True}
            answers = pool.map(lambda _: tenant.http.post("/v1/completions", json=long), range(2))
            return {answer.status_code for answer in answers} == {200}

    shared_stack.wait(both_seats)


def test_a_keys_last_use_is_written_down_when_the_gateway_stops(shared_stack: Stack) -> None:
    tenant = shared_stack.tenant("seldom-seen")
    assert tenant.http.get("/v1/models").status_code == 200
    before = shared_stack.pid("gateway")
    os.kill(before, signal.SIGTERM)
    shared_stack.wait(lambda: shared_stack.pid("gateway") != before)
    shared_stack.wait_ready()
    keys = shared_stack.operator.get(f"/admin/v1/tenants/{tenant.name}/keys").json()["data"]
    assert keys[0]["last_used_at"] is not None


async def _all(lines) -> list[str]:
    return [line async for line in lines]
