"""Limits hold, are shown in headers, and are refunded where tokens were not used."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import running

BODY = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}


def test_requests_per_minute_end_in_a_429_that_says_when(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("rpm", requests_per_minute=2)
    answers = [tenant.http.post("/v1/completions", json=BODY) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    last = answers[2]
    assert last.json()["error"]["code"] == "rate_limit_exceeded"
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(last.headers["retry-after"]) <= 60
    assert int(last.headers["retry-after-ms"]) > 0


def test_tokens_per_minute_reserve_max_tokens_and_refund_the_rest(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("tpm", tokens_per_minute=1000)
    huge = tenant.http.post("/v1/completions", json=BODY | {"max_tokens": 400})
    assert huge.status_code == 200
    # 403 were reserved and 403 used; a stop after few tokens gives the rest back.
    short = tenant.http.post(
        "/v1/completions", json=BODY | {"max_tokens": 400, "stop_token_ids": list(range(4, 60))}
    )
    used = 403 + short.json()["usage"]["total_tokens"]
    after = tenant.http.post("/v1/completions", json=BODY | {"max_tokens": 1})
    remaining = int(after.headers["x-ratelimit-remaining-tokens"])
    assert remaining >= 1000 - used - 4
    assert after.headers["x-ratelimit-limit-tokens"] == "1000"


def test_a_request_beyond_the_tokens_left_is_refused_and_costs_nothing(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("tpm2", tokens_per_minute=300, requests_per_minute=10)
    assert tenant.http.post("/v1/completions", json=BODY | {"max_tokens": 250}).status_code == 200
    refused = tenant.http.post("/v1/completions", json=BODY | {"max_tokens": 250})
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-requests"] == "9"


def test_a_tenant_without_limits_has_no_such_headers(tiny: TinyWorld) -> None:
    answer = tiny.tenant.http.post("/v1/completions", json=BODY)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_a_body_over_the_limit_is_refused(tiny: TinyWorld) -> None:
    answer = tiny.tenant.http.post("/v1/completions", json=BODY | {"prompt": "x" * (5 << 20)})
    assert answer.status_code == 413


def test_concurrency_is_held_while_answers_run_and_not_after(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("one-seat", max_concurrency=1)
    url, headers = f"{tiny.stack.base_url}/v1/completions", tenant.http.headers
    long = BODY | {"max_tokens": 500, "stream": True}
    with httpx.stream("POST", url, json=long, headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()  # kept in a variable: dropping the iterator would hang up
        assert next(lines).startswith("data: ")
        refused = tenant.http.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
    tiny.stack.wait(lambda: tenant.http.post("/v1/completions", json=BODY).status_code == 200)


def test_no_token_in_time_is_a_503_and_costs_nothing(tmp_path: Path, tiny_model: Path) -> None:
    slow = {
        "max_model_len": 512, "max_num_seqs": 1, "first_token_timeout_s": 0.3,
        "environment": {"FAKE_STEP_S": "0.01"},
    }  # fmt: skip
    with running(tmp_path / "stack", tiny_model, fake_engine=True, **slow) as stack:
        tenant = stack.tenant("acme")
        url, headers = f"{stack.base_url}/v1/completions", tenant.http.headers
        long = BODY | {"max_tokens": 300, "stream": True}
        with httpx.stream("POST", url, json=long, headers=headers, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            refused = tenant.http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "first_token_timeout"
            assert int(refused.headers["retry-after"]) >= 1
            assert list(lines)[-2] == "data: [DONE]", "whoever has begun goes on"
        free, paid = sorted(stack.settled_events(2), key=lambda event: event["amount_nanousd"])
        assert (free["stop_cause"], free["amount_nanousd"]) == ("first_token_timeout", 0)
        assert paid["amount_nanousd"] > 0


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/openapi.json"])
def test_machines_are_answered_without_a_key(tiny: TinyWorld, path: str) -> None:
    assert tiny.stack.client("").get(path, headers={"authorization": ""}).status_code == 200


def test_every_answer_carries_a_request_id(tiny: TinyWorld) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing", "/admin/v1/tenants"):
        assert tiny.tenant.http.get(path).headers["x-request-id"].startswith("req_")
