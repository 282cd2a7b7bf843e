"""Answers that end early by order, of their client or of SIGTERM, end like any other."""

import json
import os
import signal
from typing import Any

import httpx

from tests.e2e.stack import Stack, Tenant
from tests.e2e.streams import StreamThread

SHORT, LONG = 100, 480


def test_all_answers_of_a_request_that_is_cancelled_end_and_one_usage_follows(
    scripted: Stack,
) -> None:
    tenant, other = scripted.tenant("cancels"), scripted.tenant("cannot-cancel")
    asked = StreamThread(tenant, max_tokens=LONG, n=2)
    path = f"/v1/chat/completions/{asked.got.events[0]['id']}/cancel"
    assert other.http.post(path).status_code == 404
    assert tenant.http.post(path).json()["cancelled"] is True
    usage = asked.usage
    assert tenant.http.post(path).status_code == 404, "it has ended"
    choices = [choice for event in asked.got.events for choice in event["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert {end["finish_reason"] for end in ends} == {"stop"}
    assert 0 < usage["completion_tokens"] < 2 * LONG
    assert usage["x_chorale"]["stop_cause"] == "aborted"


def test_at_sigterm_what_runs_ends_in_time_and_nobody_new_is_admitted(scripted: Stack) -> None:
    """The gateway also writes down when keys were last used."""
    tenant = scripted.tenant("drained")
    short, long = (StreamThread(tenant, max_tokens=tokens) for tokens in (SHORT, LONG))
    os.kill(scripted.pid("gateway"), signal.SIGTERM)
    scripted.wait(lambda: is_refused(scripted))
    assert not long.got.is_whole, "it is under way meanwhile"
    usages = [short.usage, long.usage]
    causes = [usage["x_chorale"]["stop_cause"] for usage in usages]
    assert causes == ["max_tokens", "aborted"], "the second is ordered to end in time"
    assert SHORT < usages[1]["completion_tokens"] < LONG
    # The supervisor has started the gateway again.
    scripted.wait_ready()
    scripted.wait(lambda: sorted(tokens_billed(tenant)) == sorted(map(tokens_of, usages)))
    keys = scripted.operator.get(f"/admin/v1/tenants/{tenant.name}/keys").json()["data"]
    assert keys[0]["last_used_at"] is not None


def is_refused(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.base_url}/ready").status_code == 503
    except httpx.TransportError:
        return True


def tokens_of(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens"])


def tokens_billed(tenant: Tenant) -> list[int]:
    text = tenant.http.get("/v1/usage/export?format=jsonl").text
    return [tokens_of(json.loads(line)) for line in text.splitlines()]
