"""Headers of answers: the limits, and when to retry."""

import pytest

from server.api.limit_headers import (
    format_duration,
    limit_headers,
    refusal_headers,
    retry_headers,
)
from server.limits.rules import Limit, RateLimited, Standing

WIDE = Standing(limit=Limit("tokens", "tenant", "t", 1000), remaining=500, reset_ms=30_000)
NARROW = Standing(limit=Limit("tokens", "key", "k", 100), remaining=10, reset_ms=54_001)
REQUESTS = Standing(limit=Limit("requests", "tenant", "t", 60), remaining=59, reset_ms=1000)
SEATS = Standing(limit=Limit("concurrency", "tenant", "t", 2), remaining=1, reset_ms=9000)


def test_the_limit_with_the_least_of_it_left_speaks_for_its_kind() -> None:
    headers = limit_headers([WIDE, NARROW, REQUESTS, SEATS])
    assert headers["x-ratelimit-limit-tokens"] == "100"
    assert headers["x-ratelimit-remaining-tokens"] == "10"
    assert headers["x-ratelimit-reset-tokens"] == "54.001s"
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-reset-requests"] == "1s"
    assert headers["x-ratelimit-scope"] == "tokens;key"


def test_the_ietfs_headers_name_every_limit() -> None:
    headers = limit_headers([WIDE, SEATS])
    assert headers["ratelimit-policy"] == '"tokens-tenant";q=1000;w=60, "concurrency-tenant";q=2'
    assert headers["ratelimit"] == '"tokens-tenant";r=500;t=30, "concurrency-tenant";r=1;t=9'


def test_of_the_limits_of_a_key_and_those_above_it_the_ietfs_headers_name_one() -> None:
    above = Standing(limit=Limit("tokens", "key", "above", 1000), remaining=20, reset_ms=1000)
    headers = limit_headers([WIDE, NARROW, above])
    assert headers["ratelimit"] == '"tokens-tenant";r=500;t=30, "tokens-key";r=20;t=1'
    assert headers["ratelimit-policy"].count("tokens-key") == 1


def test_without_a_limit_nothing_is_said_but_that_the_limiter_is_degraded() -> None:
    assert limit_headers([]) == {}
    assert limit_headers([], is_degraded=True) == {"x-chorale-limiter": "degraded"}


def test_a_refusal_names_its_limit() -> None:
    refused = RateLimited(WIDE.limit, retry_after_ms=1201, standings=(WIDE, NARROW))
    headers = refusal_headers(refused)
    assert headers["x-ratelimit-scope"] == "tokens;tenant", "the one that refused, not the fullest"
    assert headers["x-should-retry"] == "true"
    assert headers["x-ratelimit-remaining-tokens"] == "10"
    degraded = RateLimited(WIDE.limit, retry_after_ms=1, standings=(), is_degraded=True)
    assert refusal_headers(degraded)["x-chorale-limiter"] == "degraded"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (8.64, "8.64s"), (59.9999, "1m0s"),
        (360, "6m0s"), (3600, "1h0m0s"), (3661.5, "1h1m1.5s"),
    ],
)  # fmt: skip
def test_durations_read_as_go_prints_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_retry_after_is_never_too_early() -> None:
    assert retry_headers(0.0) == {"retry-after": "1", "retry-after-ms": "1"}
    assert retry_headers(1.2004) == {"retry-after": "2", "retry-after-ms": "1201"}
