"""A cancelled answer, or one out of time, ends like any other; the tokens it has are paid."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack, Tenant, running

BODY = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """A stack with two seats: a third answer waits in the engine's queue. 400 tokens take 4 s."""
    settings: dict[str, Any] = {"max_num_seqs": 2, "environment": {"FAKE_STEP_S": "0.01"}}
    settings |= {"request_timeout_s": 1.5}
    folder = tmp_path_factory.mktemp("cancel")
    with running(folder, tiny_model, fake_engine=True, max_model_len=512, **settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def tenant(stack: Stack) -> Tenant:
    return stack.tenant("acme")


class Asked(threading.Thread):
    """A request under way, and its answer."""

    def __init__(self, tenant: Tenant, body: dict[str, Any]) -> None:
        super().__init__()
        self._tenant = tenant
        self._body = body
        self.answer: httpx.Response
        before = self._open()
        self.start()
        tenant.stack.wait(lambda: self._open() - before)
        (self.request_id,) = self._open() - before

    def run(self) -> None:
        headers = {"authorization": f"Bearer {self._tenant.api_key}"}
        url = f"{self._tenant.stack.base_url}/v1/completions"
        self.answer = httpx.post(url, json=self._body, headers=headers, timeout=30)

    def _open(self) -> set[str]:
        with closing(sqlite3.connect(self._tenant.stack.data_dir / "chorale.db")) as db:
            return {row[0] for row in db.execute("SELECT request_id FROM holds WHERE state='open'")}

    def cancel(self, tenant: Tenant | None = None) -> httpx.Response:
        asking = tenant or self._tenant
        return asking.http.post(f"/v1/chat/completions/cmpl-{self.request_id}/cancel")

    def cancelled(self) -> httpx.Response:
        """Cancel the request and return its answer."""
        assert self.cancel().json()["cancelled"] is True
        self.join(30)
        assert self.cancel().status_code == 404, "it has ended"
        return self.answer


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    *events, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_whole_answer_is_what_there_was_of_it(tenant: Tenant) -> None:
    asked = Asked(tenant, BODY)
    body = asked.cancelled().json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert 0 <= body["usage"]["completion_tokens"] < 400
    assert body["usage"]["x_chorale"]["stop_cause"] == "aborted"


def test_all_answers_of_one_request_end_and_one_usage_follows(tenant: Tenant) -> None:
    *streamed, last = chunks(Asked(tenant, STREAM | {"n": 2}).cancelled())
    ends = [c["choices"][0] for c in streamed if c["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] < 800


def test_one_that_still_waits_for_its_turn_ends_with_nothing_to_pay_but_its_usage(
    tenant: Tenant,
) -> None:
    before = Asked(tenant, STREAM | {"n": 2})
    waiting = Asked(tenant, STREAM)
    *_, last = chunks(waiting.cancelled())
    assert last["usage"]["completion_tokens"] == 0
    assert last["usage"]["x_chorale"]["cost_nanousd"] == 0
    chunks(before.cancelled())


def test_only_its_own_tenant_can_cancel_it_and_twice_is_no_fault(tenant: Tenant) -> None:
    other = tenant.stack.tenant("globex")
    asked = Asked(tenant, STREAM)
    refused = asked.cancel(other)
    assert refused.status_code == 404
    unknown = other.http.post("/v1/chat/completions/cmpl-unknown/cancel")
    assert refused.json() == unknown.json()
    assert asked.cancel().status_code == 200
    assert asked.cancel().status_code in (200, 404), "it may have ended by now"
    asked.join(30)
    assert chunks(asked.answer)[-1]["usage"]["completion_tokens"] < 400


def test_a_stream_that_runs_out_of_time_ends_as_length_with_its_usage(tenant: Tenant) -> None:
    asked = Asked(tenant, STREAM)
    asked.join(30)
    *streamed, last = chunks(asked.answer)
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    assert 0 < last["usage"]["completion_tokens"] < 400
    assert last["usage"]["x_chorale"]["stop_cause"] == "deadline"
    assert last["usage"]["x_chorale"]["cost_nanousd"] > 0
