"""Answers that end early by order, of their client or of SIGTERM, end like any other."""

import json
import os
import signal
import threading
from typing import Any

import httpx

from tests.e2e.stack import Stack, Tenant

STREAM = {
    "model": "base", "prompt": [5, 6, 7], "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
SHORT, LONG = 100, 480


class Asked(threading.Thread):
    """A stream under way, and its events."""

    def __init__(self, tenant: Tenant, **changes: Any) -> None:
        super().__init__()
        self._tenant, self._body = tenant, STREAM | changes
        self._has_begun = threading.Event()
        self.events: list[dict[str, Any]] = []
        self.has_ended = False
        self.start()
        assert self._has_begun.wait(30)

    def run(self) -> None:
        headers = {"authorization": f"Bearer {self._tenant.api_key}"}
        url = f"{self._tenant.stack.base_url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.has_ended = True
                elif line:
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self._has_begun.set()

    def usage(self) -> dict[str, Any]:
        """Return the usage, once the answer has come to its end."""
        self.join(60)
        assert self.has_ended
        usage: dict[str, Any] = self.events[-1]["usage"]
        return usage


def test_all_answers_of_a_request_that_is_cancelled_end_and_one_usage_follows(
    scripted: Stack,
) -> None:
    tenant, other = scripted.tenant("cancels"), scripted.tenant("cannot-cancel")
    asked = Asked(tenant, max_tokens=LONG, n=2)
    path = f"/v1/chat/completions/{asked.events[0]['id']}/cancel"
    assert other.http.post(path).status_code == 404
    assert tenant.http.post(path).json()["cancelled"] is True
    usage = asked.usage()
    assert tenant.http.post(path).status_code == 404, "it has ended"
    choices = [choice for event in asked.events for choice in event["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert {end["finish_reason"] for end in ends} == {"stop"}
    assert 0 < usage["completion_tokens"] < 2 * LONG
    assert usage["x_chorale"]["stop_cause"] == "aborted"


def test_at_sigterm_what_runs_ends_in_time_and_nobody_new_is_admitted(scripted: Stack) -> None:
    """The gateway also writes down when keys were last used."""
    tenant = scripted.tenant("drained")
    short, long = (Asked(tenant, max_tokens=tokens) for tokens in (SHORT, LONG))
    os.kill(scripted.pid("gateway"), signal.SIGTERM)
    scripted.wait(lambda: is_refused(scripted))
    assert not long.has_ended, "it is under way meanwhile"
    usages = [short.usage(), long.usage()]
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
