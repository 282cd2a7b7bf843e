"""Usage of requests that have just been answered, as OpenAI's own client reads it."""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai

from tests.e2e.stack import Stack, Tenant

FRESH_MS = 5000
DAY_S = 86_400
NUM_REQUESTS = {"base": 3, "alpha": 2}


def usage_of(tenant: Tenant) -> dict[str, Any]:
    found: dict[str, Any] = tenant.http.get("/v1/usage").json()["data"][0]
    return found


def results(ask: Callable[..., Any], **params: Any) -> list[Any]:
    """Return the results of every bucket of the last day, read page by page."""
    params = {"start_time": int(time.time()) - DAY_S, "limit": 1} | params
    page = ask(**params)
    found = [result for bucket in page.data for result in bucket.results]
    while page.has_more:
        page = ask(**params, page=page.next_page)
        found += [result for bucket in page.data for result in bucket.results]
    return found


def test_answered_requests_are_in_the_usage_within_seconds_and_openais_client_reads_it(
    scripted: Stack, tiny_adapters: dict[str, Path]
) -> None:
    """The exact amounts, which are given beside OpenAI's floats, equal those of `/v1/usage`."""
    tenant = scripted.tenant("usage")
    tenant.push("alpha", tiny_adapters["alpha"])
    for model, count in NUM_REQUESTS.items():
        for _ in range(count):
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
            assert tenant.http.post("/v1/completions", json=body).status_code == 200
    scripted.wait(lambda: usage_of(tenant)["num_requests"] == sum(NUM_REQUESTS.values()))
    with closing(sqlite3.connect(scripted.data_dir / "chorale.db")) as db:
        query = "SELECT max(posted_at_ms - ended_at_ms) FROM usage_events WHERE tenant_id = ?"
        (late_ms,) = db.execute(query, [tenant.tenant_id]).fetchone()
    assert late_ms < FRESH_MS
    key = {"api_key": "unused", "admin_api_key": tenant.api_key}
    with openai.OpenAI(base_url=f"{scripted.base_url}/v1", **key) as client:
        found = results(
            client.admin.organization.usage.completions,
            bucket_width="1h",
            limit=7,
            group_by=["model", "project_id"],
            models=["alpha", "nobody"],
            project_ids=[tenant.tenant_id, "nobody"],
        )
        costs = results(client.admin.organization.usage.costs, group_by=["line_item"])
    assert sum(result.num_model_requests for result in found) == NUM_REQUESTS["alpha"]
    assert {(result.model, result.project_id) for result in found} == {("alpha", tenant.tenant_id)}
    assert {cost.line_item for cost in costs} >= {"prompt", "completion"}
    assert sum(cost.amount_nanousd for cost in costs) == usage_of(tenant)["amount_nanousd"] > 0
    assert all(cost.amount.value == cost.amount_nanousd / 10**9 for cost in costs)
