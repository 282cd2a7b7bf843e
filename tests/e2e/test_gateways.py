"""Four gateways on one PostgreSQL and one Redis, with two engines each, share one tenant's limits.

test_gateways_of_a_machine.py is the short form, with two gateways before the same two engines.

Between two moments t apart, the admitted amount is at most the limit's amount times (1 + t / 60 s):
the amount available at first, and the amount refilled. This holds whatever happens to Redis.
"""

import asyncio
import itertools
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.journal_records import read_records
from engine.records import EndRecord, StartRecord
from tests import needs
from tests.e2e.stack import Stack, Tenant
from tests.redis_server import RedisServer

NUM_GATEWAYS = 4
ENGINES = ("engine", "engine-2")
"""Names of each gateway's engines, and of their folders."""
NUM_STREAMS = 200
PROMPT = [5, 6, 7]

pytestmark = pytest.mark.soak


@dataclass
class Got:
    """How one request ended. sent_at, begun_at: when it was sent, and when its answer began."""

    status: int
    sent_at: float
    begun_at: float
    text: str = ""
    usage: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fleet:
    """Four gateways that share one database and one Redis.

    probe: key of a tenant whose limits are read to see whether a gateway is degraded.
    """

    stacks: list[Stack]
    redis: RedisServer
    database: sa.Engine
    probe: str = ""

    def tenant(self, name: str, **limits: Any) -> Tenant:
        return self.stacks[0].tenant(name, **limits)

    def run(self, tenant: Tenant, count: int, **changes: Any) -> list[Got]:
        """Run `count` streams at once, in turn on all gateways."""
        return asyncio.run(self._run(tenant, count, changes))

    async def _run(self, tenant: Tenant, count: int, changes: dict[str, Any]) -> list[Got]:
        limits = httpx.Limits(max_connections=count)
        headers = {"authorization": f"Bearer {tenant.api_key}"}
        async with httpx.AsyncClient(limits=limits, timeout=120, headers=headers) as client:
            urls = itertools.cycle(stack.base_url for stack in self.stacks)
            return await asyncio.gather(
                *(stream(client, url, changes) for _, url in zip(range(count), urls, strict=False))
            )

    def wait_healthy(self) -> None:
        """Wait until every gateway counts in Redis again, and a minute has passed since."""
        for stack in self.stacks:
            http = stack.client(self.probe)
            stack.wait(lambda http=http: not http.get("/v1/limits").json()["limiter_degraded"], 200)

    def spent_nanousd(self, tenant: Tenant) -> int:
        """Return the tenant's spending by the ledger, once no hold is open."""
        query = sa.text("SELECT count(*) FROM holds WHERE state = 'open' AND tenant_id = :tenant")
        spent = sa.text(
            "SELECT coalesce(sum(amount_nanousd), 0) FROM usage_events WHERE tenant_id = :tenant"
        )
        values = {"tenant": tenant.tenant_id}
        with self.database.connect() as conn:
            self.stacks[0].wait(lambda: conn.scalar(query, values) == 0)
            return int(conn.scalar(spent, values) or 0)

    def num_engines_of(self, tenant: Tenant) -> int:
        """Return how many engines have served the tenant by the ledger, once no hold is open."""
        self.spent_nanousd(tenant)
        query = sa.text(
            "SELECT count(DISTINCT engine_id) FROM usage_events WHERE tenant_id = :tenant"
        )
        with self.database.connect() as conn:
            return int(conn.scalar(query, {"tenant": tenant.tenant_id}) or 0)

    def most_at_once(self, tenant: Tenant) -> int:
        """Return the most requests that ran at once, by the engines' own journals."""
        events: list[tuple[float, int]] = []
        for stack, name in itertools.product(self.stacks, ENGINES):
            ours: set[str] = set()
            for record in read_records(stack.data_dir / name / "journal"):
                if isinstance(record, StartRecord) and record.tenant_id == tenant.tenant_id:
                    ours.add(record.request_id)
                    events.append((record.at, 1))
                elif isinstance(record, EndRecord) and record.request_id in ours:
                    events.append((record.at, -1))
        return max(itertools.accumulate(step for _, step in sorted(events)), default=0)


async def stream(client: httpx.AsyncClient, url: str, changes: dict[str, Any]) -> Got:
    body = {
        "model": "base", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **changes,
    }  # fmt: skip
    sent_at = time.monotonic()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        got = Got(answer.status_code, sent_at, time.monotonic(), headers=dict(answer.headers))
        lines = [line async for line in answer.aiter_lines() if line]
    if got.status != 200:
        got.text = "\n".join(lines)
        return got
    assert lines[-1] == "data: [DONE]", "a stream that was admitted ends as it should"
    got.usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    return got


def num_ready(stack: Stack) -> int:
    engines = stack.operator.get("/admin/v1/engines").json()["data"]
    return sum(engine["state"] == "ready" for engine in engines)


def check(answers: list[Got], amount: int, units: Callable[[Got], int] = lambda _: 1) -> None:
    """Check that no more than the limit was admitted between any two moments, and that requests
    were refused only for the limit.
    """
    assert {got.status for got in answers} <= {200, 429}, [got.text for got in answers][:3]
    admitted = [got for got in answers if got.status == 200]
    assert admitted, "a limit is no wall"
    for first in admitted:
        inside = [got for got in admitted if got.sent_at >= first.sent_at]
        seconds = max(got.begun_at for got in inside) - first.sent_at
        assert sum(map(units, inside)) <= amount * (1 + seconds / 60), (len(inside), seconds)


def total_tokens(got: Got) -> int:
    assert got.usage
    return int(got.usage["total_tokens"])


@pytest.fixture(scope="module")
def fleet(make_postgres, tiny_model: Path, tmp_path_factory) -> Iterator[Fleet]:
    needs.redis()
    url = make_postgres("template1")
    secrets_of_all = {
        "CHORALE_PEPPER": secrets.token_hex(32),
        "CHORALE_RECEIPT_SIGNING_KEY": secrets.token_hex(32),
        "FAKE_STEP_S": "0.01",
    }
    with tempfile.TemporaryDirectory() as short:
        redis = RedisServer(Path(short)).start()
        folder = tmp_path_factory.mktemp("fleet")
        shared = {
            "database_url": url, "redis_url": redis.url, "fake_engine": True,
            "storage": (folder / "objects").as_uri(), "max_num_seqs": 64, "max_model_len": 512,
            # Four gateways and 200 clients share two cores: they are late, not Redis.
            "redis_deadline_s": 2.0, "request_timeout_s": 20.0, "engines": len(ENGINES),
        }  # fmt: skip
        stacks = [Stack(folder / f"{n}", tiny_model, **shared) for n in range(NUM_GATEWAYS)]
        engine = sa.create_engine(sa.engine.make_url(url))
        try:
            for stack in stacks:
                stack.start(**secrets_of_all, wait=False)
            for stack in stacks:
                stack.wait(lambda stack=stack: num_ready(stack) == len(ENGINES))
            fleet = Fleet(stacks, redis, engine)
            fleet.probe = fleet.tenant("looks", requests_per_minute=1000).api_key
            yield fleet
        finally:
            for stack in stacks:
                stack.stop()
            engine.dispose()
            redis.stop()


def test_behind_every_gateway_both_engines_serve(fleet: Fleet) -> None:
    """Precondition of the following tests: they are about pools only if both engines serve."""
    tenant = fleet.tenant("everywhere")
    answers = fleet.run(tenant, 80)
    assert {got.status for got in answers} == {200}
    assert fleet.num_engines_of(tenant) == NUM_GATEWAYS * len(ENGINES)


def test_200_streams_on_four_gateways_get_the_requests_of_one_limit(fleet: Fleet) -> None:
    tenant = fleet.tenant("requests", requests_per_minute=20)
    answers = fleet.run(tenant, NUM_STREAMS)
    check(answers, 20)
    assert sum(got.status == 200 for got in answers) >= 20, "and no fewer"
    refused = next(got for got in answers if got.status == 429)
    assert refused.headers["x-ratelimit-limit-requests"] == "20"
    assert "x-chorale-limiter" not in refused.headers


def test_200_streams_on_four_gateways_get_the_tokens_of_one_limit(fleet: Fleet) -> None:
    tenant = fleet.tenant("tokens", tokens_per_minute=100)
    answers = fleet.run(tenant, NUM_STREAMS)
    check(answers, 100, total_tokens)
    assert sum(got.status == 200 for got in answers) >= 12, "eight tokens each"


def test_200_streams_on_four_gateways_share_three_seats(fleet: Fleet) -> None:
    tenant = fleet.tenant("seats", max_concurrency=3)
    answers = fleet.run(tenant, NUM_STREAMS, max_tokens=40)
    assert {got.status for got in answers} == {200, 429}
    assert fleet.most_at_once(tenant) == 3
    looks = fleet.stacks[2].client(tenant.api_key)
    fleet.stacks[2].wait(lambda: looks.get("/v1/limits").json()["data"][0]["used"] == 0, 10)


def check_budget(fleet: Fleet, count: int, num_tokens: int) -> None:
    """Check that streams of 100 tokens spend a budget of so many tokens to its last one."""
    tenant = fleet.tenant("budget")
    price = fleet.stacks[0].operator.get("/admin/v1/prices").json()["data"][0]
    prompt, completion = int(price["prompt_nanousd"]), int(price["completion_nanousd"])
    # The budget is enough for a part of the requests; the last ones get the rest.
    budget = num_tokens * completion + 7
    path = f"/admin/v1/tenants/{tenant.name}/budgets/monthly/hard"
    amount = f"{budget // 10**9}.{budget % 10**9:09d}"
    assert fleet.stacks[0].operator.put(path, json={"amount": amount}).status_code == 200
    answers = fleet.run(tenant, count, max_tokens=100)
    assert {got.status for got in answers} == {200, 429}
    spent = fleet.spent_nanousd(tenant)
    assert spent <= budget
    served = [got.usage for got in answers if got.usage]
    tokens = sum(usage["completion_tokens"] for usage in served)
    assert spent == tokens * completion + len(served) * len(PROMPT) * prompt
    # The rest of the budget goes, to the token, to a request that asks for all of it.
    left = (budget - spent - len(PROMPT) * prompt) // completion
    last = fleet.run(tenant, 1, max_tokens=400)[0]
    if left >= 1:
        assert last.usage
        assert last.usage["completion_tokens"] == min(left, 400)
    else:
        assert last.status == 429
    refused = fleet.run(tenant, 1, max_tokens=400)[0]
    if left <= 400:
        assert (refused.status, refused.headers["x-should-retry"]) == (429, "false")


def test_200_streams_on_four_gateways_spend_one_budget_to_its_last_token(fleet: Fleet) -> None:
    check_budget(fleet, NUM_STREAMS, 3000)


@pytest.mark.parametrize("fault", ["wiped", "stopped", "frozen"])
def test_no_more_is_admitted_while_redis_is(fault: str, fleet: Fleet) -> None:
    """Requests are sent all the time, through the fault and after its end."""
    fleet.wait_healthy()
    tenant = fleet.tenant(f"while-{fault}", requests_per_minute=60)
    answers = fleet.run(tenant, 80)
    assert sum(got.status == 200 for got in answers) >= 60, "all of it was there"
    break_redis, mend = {
        "wiped": (fleet.redis.wipe, lambda: None),
        "stopped": (fleet.redis.stop, fleet.redis.start),
        "frozen": (fleet.redis.freeze, fleet.redis.thaw),
    }[fault]
    break_redis()
    for _ in range(5):
        answers += fleet.run(tenant, 20)
    if fault == "frozen":
        # Redis is frozen for 30 seconds, in which no request is kept waiting.
        broken_at = time.monotonic()
        while time.monotonic() < broken_at + 30:
            answers += fleet.run(tenant, 20)
    degraded = [got for got in answers if "x-chorale-limiter" in got.headers]
    assert {got.headers["x-chorale-limiter"] for got in degraded} == {"degraded"}
    mend()
    for _ in range(5):
        answers += fleet.run(tenant, 20)
    check(answers, 60)
