"""Streams of one tenant at several gateways, and whether its limits held.

Between two moments t apart, the admitted amount is at most the limit's amount times (1 + t / 60 s):
the amount available at first, and the amount refilled. Each time that Redis dies or comes back may
add the amount once.
"""

import asyncio
from dataclasses import dataclass

import sqlalchemy as sa

from tests.e2e.stack import Stack, Tenant
from tests.e2e.streams import Streamed, run_streams
from tests.redis_server import RedisServer

PROMPT = [5, 6, 7]


@dataclass
class Machine:
    """A stack with several gateways behind one port, its Redis and its PostgreSQL database."""

    stack: Stack
    redis: RedisServer
    database: sa.Engine

    def run(self, tenant: Tenant, count: int, max_tokens: int = 5) -> list[Streamed]:
        """Run `count` streams at once; one that is admitted ends as it should."""
        found = asyncio.run(run_streams(tenant, count, prompt=PROMPT, max_tokens=max_tokens))
        assert all(got.is_whole for got in found if got.status == 200)
        return found

    def spent_nanousd(self, tenant: Tenant) -> int:
        """Return the tenant's spending by the ledger, once no hold is open."""
        query = sa.text("SELECT count(*) FROM holds WHERE state = 'open' AND tenant_id = :tenant")
        spent = sa.text(
            "SELECT coalesce(sum(amount_nanousd), 0) FROM usage_events WHERE tenant_id = :tenant"
        )
        values = {"tenant": tenant.tenant_id}
        with self.database.connect() as conn:
            self.stack.wait(lambda: conn.scalar(query, values) == 0)
            return int(conn.scalar(spent, values) or 0)

    def num_engines_of(self, tenant: Tenant) -> int:
        """Return how many engines have served the tenant by the ledger, once no hold is open."""
        self.spent_nanousd(tenant)
        query = sa.text(
            "SELECT count(DISTINCT engine_id) FROM usage_events WHERE tenant_id = :tenant"
        )
        with self.database.connect() as conn:
            return int(conn.scalar(query, {"tenant": tenant.tenant_id}) or 0)


def check(answers: list[Streamed], amount: int, upsets: int = 0) -> None:
    """Check that no more than the limit was admitted between any two moments, and that requests
    were refused only for the limit.

    upsets: how often Redis died or came back.
    """
    assert {got.status for got in answers} <= {200, 429}
    admitted = [got for got in answers if got.status == 200]
    assert admitted, "a limit is no wall"
    for first in admitted:
        inside = [got for got in admitted if got.sent_at >= first.sent_at]
        seconds = max(got.begun_at for got in inside) - first.sent_at
        assert len(inside) <= amount * (1 + upsets + seconds / 60), (len(inside), seconds)


def check_budget(machine: Machine, count: int, num_tokens: int) -> None:
    """Check that streams of 100 tokens spend a budget of so many tokens to its last one."""
    tenant = machine.stack.tenant("budget")
    price = machine.stack.operator.get("/admin/v1/prices").json()["data"][0]
    prompt, completion = int(price["prompt_nanousd"]), int(price["completion_nanousd"])
    # The budget is enough for a part of the requests; the last ones get the rest.
    budget = num_tokens * completion + 7
    path = f"/admin/v1/tenants/{tenant.name}/budgets/monthly/hard"
    amount = f"{budget // 10**9}.{budget % 10**9:09d}"
    assert machine.stack.operator.put(path, json={"amount": amount}).status_code == 200
    answers = machine.run(tenant, count, max_tokens=100)
    assert {got.status for got in answers} == {200, 429}
    spent = machine.spent_nanousd(tenant)
    assert spent <= budget
    served = [got.usage for got in answers if got.status == 200]
    tokens = sum(usage["completion_tokens"] for usage in served)
    assert spent == tokens * completion + len(served) * len(PROMPT) * prompt
    # The rest of the budget goes, to the token, to a request that asks for all of it.
    left = (budget - spent - len(PROMPT) * prompt) // completion
    last = machine.run(tenant, 1, max_tokens=400)[0]
    if left >= 1:
        assert last.usage["completion_tokens"] == min(left, 400)
    else:
        assert last.status == 429
    refused = machine.run(tenant, 1, max_tokens=400)[0]
    if left <= 400:
        assert (refused.status, refused.headers["x-should-retry"]) == (429, "false")
