"""Usage of requests that have just been answered, as OpenAI's own client reads it."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.stack import Stack, Tenant, running

FRESH_MS = 5000
DAY_S = 86_400
NUM_REQUESTS = {"base": 3, "alpha": 2}


@pytest.fixture(scope="module")
def stack(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack with two tenants whose requests are answered and counted in their usage."""
    folder = tmp_path_factory.mktemp("usage-stack")
    with running(folder, tiny_model, fake_engine=True, max_model_len=512) as stack:
        for name in ("acme", "globex"):
            tenant = stack.tenant(name)
            tenant.push("alpha", tiny_adapters["alpha"])
            for model, count in NUM_REQUESTS.items():
                for _ in range(count):
                    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
                    assert tenant.http.post("/v1/completions", json=body).status_code == 200
        for tenant in stack.tenants:
            stack.wait(lambda t=tenant: usage_of(t)["num_requests"] == sum(NUM_REQUESTS.values()))
        yield stack


def usage_of(tenant: Tenant) -> dict:
    return tenant.http.get("/v1/usage").json()["data"][0]


def client_of(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", admin_api_key=key)


def results(ask: Callable[..., Any], **params: Any) -> list[Any]:
    """Return the results of every bucket of the last day, read page by page."""
    params = {"start_time": int(time.time()) - DAY_S, "limit": 1} | params
    page = ask(**params)
    found = [result for bucket in page.data for result in bucket.results]
    while page.has_more:
        page = ask(**params, page=page.next_page)
        found += [result for bucket in page.data for result in bucket.results]
    return found


def test_an_answered_request_is_in_the_usage_within_seconds(stack: Stack) -> None:
    """The fixture has read all requests from the usage; the ledger has the times of posting."""
    with closing(sqlite3.connect(stack.data_dir / "chorale.db")) as db:
        late_ms = db.execute("SELECT posted_at_ms - ended_at_ms FROM usage_events").fetchall()
    assert len(late_ms) >= 2 * sum(NUM_REQUESTS.values())
    assert max(late_ms) < (FRESH_MS,)


def test_openais_client_reads_a_tenants_usage(stack: Stack) -> None:
    tenant = stack.tenants[0]
    with client_of(stack, tenant.api_key) as client:
        found = results(
            client.admin.organization.usage.completions,
            bucket_width="1h",
            limit=7,
            group_by=["model", "project_id"],
            models=["alpha", "nobody"],
            project_ids=[tenant.tenant_id, "nobody"],
        )
    assert sum(result.num_model_requests for result in found) == NUM_REQUESTS["alpha"]
    assert {(result.model, result.project_id) for result in found} == {("alpha", tenant.tenant_id)}


def test_openais_client_reads_what_it_cost(stack: Stack) -> None:
    """The exact amounts, which are given beside OpenAI's floats, equal those of `/v1/usage`."""
    tenant = stack.tenants[0]
    with client_of(stack, tenant.api_key) as client:
        costs = results(client.admin.organization.usage.costs, group_by=["line_item"])
    assert {cost.line_item for cost in costs} >= {"prompt", "completion"}
    assert sum(cost.amount_nanousd for cost in costs) == usage_of(tenant)["amount_nanousd"] > 0
    assert all(cost.amount.value == cost.amount_nanousd / 10**9 for cost in costs)


def test_the_operators_key_reads_every_projects_usage(stack: Stack) -> None:
    with client_of(stack, stack.admin_key) as client:
        found = results(client.admin.organization.usage.completions, group_by=["project_id"])
    assert {result.project_id for result in found} >= {tenant.tenant_id for tenant in stack.tenants}
