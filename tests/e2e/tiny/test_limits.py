"""Limits hold, are shown in headers, and are refunded where tokens were not used."""

from tests.e2e.oracle import TinyWorld

BODY = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}


def test_requests_per_minute_end_in_a_429_that_says_when(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("rpm", requests_per_minute=2)
    answers = [tenant.http.post("/v1/completions", json=BODY) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60


def test_tokens_per_minute_reserve_max_tokens_and_refund_the_rest(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("tpm", tokens_per_minute=300)
    stops = {"max_tokens": 250, "logit_bias": {"70": 100}, "stop_token_ids": [70]}
    short = tenant.http.post("/v1/completions", json=BODY | stops)
    used = short.json()["usage"]["total_tokens"]
    assert used < 20, "it stops at once"
    after = tenant.http.post("/v1/completions", json=BODY | {"max_tokens": 1})
    assert int(after.headers["x-ratelimit-remaining-tokens"]) >= 300 - used - 4
    for max_tokens, status in ((160, 200), (250, 429)):
        answer = tenant.http.post("/v1/completions", json=BODY | {"max_tokens": max_tokens})
        assert answer.status_code == status
