import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.limits import Limiter, RateLimited, RateLimits, format_duration, retry_headers

LIMITS = RateLimits(requests_per_minute=6, tokens_per_minute=600)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 5.0, 20.0, 60.0]), st.floats(0, 1)),
        st.tuples(st.just("acquire"), st.sampled_from([20, 100, 300, 600, 700])),
        st.tuples(st.just("settle"), st.integers(0, 30), st.sampled_from([0.0, 0.3, 1.0])),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=60,
)


def play(script, limits=LIMITS):
    """Run a script; (admission time, tokens, whether it ran) of each request, and the limiter."""
    limiter, now, admitted, open_ones = Limiter(), 1000.0, [], []
    for step in script:
        if step[0] == "wait":
            now += step[1] * step[2]
        elif step[0] == "acquire":
            try:
                reservation = limiter.acquire("t", limits, step[1], now)
            except RateLimited:
                continue
            tokens = min(step[1], limits.tokens_per_minute)
            admitted.append([now, tokens, True])
            open_ones.append((reservation, admitted[-1]))
        elif open_ones:
            reservation, entry = open_ones.pop(step[1] % len(open_ones))
            if step[0] == "settle":
                entry[1] = int(entry[1] * step[2])
                reservation.settle(entry[1], now)
            else:
                entry[1], entry[2] = 0, False
                reservation.cancel(now)
    return admitted, limiter, now


@settings(max_examples=300, deadline=None)
@given(steps)
def test_no_window_admits_more_than_a_minutes_worth_and_its_refill(script):
    admitted, _, _ = play(script)
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        window = admitted[first : last + 1]
        elapsed_s = window[-1][0] - window[0][0]
        assert sum(tokens for _, tokens, _ in window) <= 600 + 10 * elapsed_s + 1e-3
        assert sum(ran for _, _, ran in window) <= 6 + 0.1 * elapsed_s + 1e-3


@settings(max_examples=200, deadline=None)
@given(steps)
def test_no_refund_makes_more_than_the_limit(script):
    _, limiter, now = play(script)
    for name, status in limiter.status("t", LIMITS, now).items():
        limit = {"requests": 6, "tokens": 600}[name]
        assert 0 <= status.remaining <= limit
        assert 0 <= status.reset_s <= 60 + 1e-6


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(1, 700))
def test_a_refused_request_changes_nothing_and_its_time_is_enough(script, tokens):
    _, limiter, now = play(script)
    before = limiter.status("t", LIMITS, now)
    try:
        limiter.acquire("t", LIMITS, tokens, now)
    except RateLimited as refused:
        for name, status in limiter.status("t", LIMITS, now).items():
            assert status.remaining == before[name].remaining
            assert status.reset_s == pytest.approx(before[name].reset_s)
        for _ in range(2):
            # Each limit is waited for in turn.
            now += refused.retry_after_s
            try:
                limiter.acquire("t", LIMITS, tokens, now)
                return
            except RateLimited as again:
                refused = again
        pytest.fail("waited twice, still refused")


def test_a_minutes_worth_comes_at_once_and_then_evenly():
    limiter, limits = Limiter(), RateLimits(requests_per_minute=60)
    for _ in range(60):
        limiter.acquire("t", limits, 0, 0.0)
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("t", limits, 0, 0.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    limiter.acquire("t", limits, 0, 1.0)
    with pytest.raises(RateLimited):
        limiter.acquire("t", limits, 0, 1.5)


@pytest.mark.parametrize("per_minute", [1, 7, 63, 133, 59_999])
def test_the_whole_limit_fits_one_by_one(per_minute):
    limiter, limits = Limiter(), RateLimits(requests_per_minute=per_minute)
    for _ in range(per_minute):
        limiter.acquire_request("t", limits, 123456.789)
    with pytest.raises(RateLimited):
        limiter.acquire_request("t", limits, 123456.789)


def test_a_request_refused_for_its_tokens_gives_its_request_back():
    limiter = Limiter()
    limiter.acquire("t", LIMITS, 600, 0.0)
    reservation = limiter.acquire_request("t", LIMITS, 0.0)
    with pytest.raises(RateLimited) as caught:
        limiter.acquire_tokens(reservation, 100, 0.0)
    assert caught.value.limit == "tokens"
    assert caught.value.retry_after_s == pytest.approx(10.0)
    assert limiter.status("t", LIMITS, 0.0)["requests"].remaining == 5


def test_a_request_for_more_than_the_limit_waits_for_a_full_bucket_not_for_ever():
    limiter = Limiter()
    limiter.acquire("t", LIMITS, 100_000, 0.0)
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("t", LIMITS, 100_000, 0.0)
    assert caught.value.retry_after_s == pytest.approx(60.0)


def test_unused_tokens_come_back_and_overrun_is_owed():
    limiter = Limiter()
    reservation = limiter.acquire("t", LIMITS, 500, 0.0)
    reservation.settle(100, 0.0)
    assert limiter.status("t", LIMITS, 0.0)["tokens"].remaining == 500
    limiter.acquire("t", LIMITS, 500, 0.0).settle(800, 0.0)
    assert limiter.status("t", LIMITS, 0.0)["tokens"].remaining == 0
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("t", LIMITS, 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(30.1)


def test_a_slow_request_gets_its_unused_tokens_back_while_its_tenant_is_busy():
    limiter = Limiter()
    limiter.acquire("t", LIMITS, 500, 0.0)
    slow = limiter.acquire("t", LIMITS, 100, 0.0)
    slow.settle(0, 40.0)
    assert limiter.status("t", LIMITS, 40.0)["tokens"].remaining == 500


def test_a_late_refund_is_worth_nothing_once_the_bucket_was_full():
    limiter, limits = Limiter(), RateLimits(tokens_per_minute=600)
    slow = limiter.acquire("t", limits, 600, 0.0)
    limiter.acquire("t", limits, 600, 60.0)
    slow.settle(0, 60.0)
    assert limiter.status("t", limits, 60.0)["tokens"].remaining == 0


def test_two_late_refunds_do_not_count_the_same_refill_twice():
    limiter, limits = Limiter(), RateLimits(tokens_per_minute=600)
    slow = [limiter.acquire("t", limits, tokens, 0.0) for tokens in (100, 500)]
    limiter.acquire("t", limits, 550, 55.0)
    for reservation in slow:
        reservation.settle(0, 55.0)
    assert limiter.status("t", limits, 55.0)["tokens"].remaining == 50


def test_settling_twice_refunds_once():
    limiter = Limiter()
    reservation = limiter.acquire("t", LIMITS, 300, 0.0)
    limiter.acquire("t", LIMITS, 300, 0.0)
    for _ in range(2):
        reservation.settle(0, 0.0)
    reservation.cancel(0.0)
    assert limiter.status("t", LIMITS, 0.0)["tokens"].remaining == 300
    assert limiter.status("t", LIMITS, 0.0)["requests"].remaining == 4


def test_tenants_do_not_share_a_bucket():
    limiter = Limiter()
    limiter.acquire("a", LIMITS, 600, 0.0)
    assert limiter.status("a", LIMITS, 0.0)["tokens"].remaining == 0
    assert limiter.status("b", LIMITS, 0.0)["tokens"].remaining == 600


def test_only_tenants_with_full_buckets_are_forgotten():
    limiter = Limiter(max_tenants=2)
    limits = RateLimits(requests_per_minute=1)
    limiter.acquire("idle", limits, 0, 0.0).settle(0, 0.0)
    limiter.acquire("busy", limits, 0, 30.0).settle(0, 30.0)
    for i in range(5):
        limiter.acquire(f"new-{i}", limits, 0, 61.0).settle(0, 61.0)
    with pytest.raises(RateLimited):
        limiter.acquire("busy", limits, 0, 61.0)
    assert limiter.num_tenants == 6
    limiter.acquire("later", limits, 0, 200.0)
    assert limiter.num_tenants == 2


def test_an_unlimited_tenant_has_no_state_and_no_headers():
    limiter = Limiter()
    limiter.acquire("t", RateLimits(), 10**9, 0.0).settle(10**9, 0.0)
    assert limiter.num_tenants == 0
    assert limiter.headers("t", RateLimits(), 0.0) == {}


def test_headers_say_what_openais_say():
    limiter = Limiter()
    limiter.acquire("t", RateLimits(requests_per_minute=60, tokens_per_minute=600), 100, 0.0)
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=600)
    assert limiter.headers("t", limits, 0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10s",
    }


def test_a_lowered_limit_holds_from_the_next_request():
    limiter = Limiter()
    limiter.acquire("t", RateLimits(requests_per_minute=60), 0, 0.0)
    with pytest.raises(RateLimited):
        limiter.acquire("t", RateLimits(requests_per_minute=1), 0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (90061.5, "25h1m1.5s"),
    ],
)
def test_durations_are_written_as_go_writes_them(seconds, text):
    assert format_duration(seconds) == text


def test_retry_after_is_never_too_early():
    assert retry_headers(0.0) == {"retry-after": "1", "retry-after-ms": "1"}
    assert retry_headers(1.2004) == {"retry-after": "2", "retry-after-ms": "1201"}
