import asyncio
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.limits.calls import Call
from server.limits.memory import MemoryLimiter
from server.limits.rules import Grant, Limit, RateLimited
from server.limits.states import States
from tests.server.limiter_machine import (
    BORN_MS,
    LATE_REFUNDS,
    LimiterMachine,
    check_expiry,
    check_refunds,
    refunds,
)

REQUESTS = Limit("requests", "tenant", "t", 6)
TOKENS = Limit("tokens", "tenant", "t", 600)
SEATS = Limit("concurrency", "tenant", "t", 2)
WALL_MS = 1_700_000_000_000


class StatesMachine(LimiterMachine):
    def make_subject(self):
        return States(born_ms=BORN_MS, max_states=100)


StatesMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestTheStatesAreTheModelsStepByStep = StatesMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(refunds)
@example(LATE_REFUNDS)
def test_refunds_of_charges_that_are_open_together_are_the_models(script):
    check_refunds(States(born_ms=BORN_MS, max_states=10), script)


def test_a_charge_expires_with_its_lease():
    check_expiry(States(born_ms=BORN_MS, max_states=10))


class Caller:
    """Calls of one gateway at times that the test sets."""

    def __init__(self, **options):
        self.now = 1_000_000
        self.numbers = itertools.count()
        self.limiter = MemoryLimiter(lambda: self.now, **options)

    def acquire(self, *limits, tokens=1, lifetime_ms=120_000) -> Grant:
        request_id = f"request-{next(self.numbers)}"
        coming = self.limiter.acquire(request_id, limits, tokens=tokens, lifetime_ms=lifetime_ms)
        return asyncio.run(coming)

    def standing(self, limit):
        return asyncio.run(self.limiter.standings([limit]))[0]


def test_of_several_reached_limits_the_one_that_takes_longest_is_named():
    caller = Caller()
    caller.acquire(REQUESTS, TOKENS, tokens=600, lifetime_ms=90_000)
    caller.acquire(SEATS, lifetime_ms=90_000)
    caller.acquire(SEATS, lifetime_ms=80_000)
    with pytest.raises(RateLimited) as caught:
        caller.acquire(REQUESTS, TOKENS, SEATS, tokens=600)
    assert (caught.value.limit, caught.value.retry_after_ms) == (SEATS, 80_000)
    assert [standing.remaining for standing in caught.value.standings] == [5, 0, 0]


def test_a_check_charges_nothing_and_refuses_what_an_acquire_would():
    caller = Caller()
    for _ in range(3):
        asyncio.run(caller.limiter.check([SEATS, REQUESTS, TOKENS]))
    caller.acquire(SEATS)
    caller.acquire(SEATS)
    with pytest.raises(RateLimited) as caught:
        asyncio.run(caller.limiter.check([SEATS, REQUESTS, TOKENS]))
    assert caught.value.limit == SEATS


steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 100, 1000, 5000, 20_000, 60_000]),
        st.sampled_from([20, 100, 300, 600, 700]),
        st.sampled_from([0.0, 0.3, 1.0, None]),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.randoms(use_true_random=False))
def test_no_window_admits_more_than_a_minutes_worth_and_its_refill(script, random):
    now, admitted, open_ones = 0, [], []
    states = States(born_ms=-60_000, max_states=10)
    for number, (wait_ms, tokens, share) in enumerate(script):
        now += wait_ms
        limits = (REQUESTS, TOKENS)
        if not any(states.acquire(Call("acquire", limits, tokens, str(number), 10**6), now)):
            admitted.append([now, min(tokens, 600), 1])
            grant = Grant(request_id=str(number), limits=limits, standings=())
            open_ones.append((grant, admitted[-1], share))
        if open_ones and random.random() < 0.7:
            grant, entry, share = open_ones.pop(random.randrange(len(open_ones)))
            entry[1] = int(entry[1] * (share or 0))
            entry[2] = int(share is not None)
            states.release(grant, None if share is None else entry[1], now)
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        window = admitted[first : last + 1]
        elapsed_ms = window[-1][0] - window[0][0]
        assert sum(tokens for _, tokens, _ in window) * 60_000 <= 600 * (60_000 + elapsed_ms)
        assert sum(ran for _, _, ran in window) * 60_000 <= 6 * (60_000 + elapsed_ms)


# ---- bounds ----


def test_only_idle_limits_are_forgotten():
    caller = Caller(max_states=2)
    one = [Limit("requests", "tenant", name, 1) for name in ("idle", "busy", "new", "later")]
    caller.limiter.release(caller.acquire(one[0]), 1)
    caller.now += 30_000
    caller.limiter.release(caller.acquire(one[1]), 1)
    caller.now += 31_000
    caller.acquire(one[2])
    assert [caller.standing(limit).remaining for limit in one] == [1, 0, 0, 1]


def test_a_table_full_of_limits_in_use_refuses_a_new_one_and_forgets_none():
    caller = Caller(max_states=2)
    one = [Limit("concurrency", "tenant", name, 1) for name in ("a", "b", "c")]
    caller.acquire(one[0], lifetime_ms=1000)
    caller.acquire(one[1], lifetime_ms=5000)
    with pytest.raises(RateLimited) as caught:
        caller.acquire(one[2])
    assert caught.value.retry_after_ms == 1000
    caller.now += 1000
    caller.acquire(one[2])
    assert caller.standing(one[1]).remaining == 0


# ---- between two gateways ----


def gateway(path, wall_ms=WALL_MS) -> Caller:
    """A gateway that has started with the file."""
    caller = Caller(path=path, wall_clock=lambda: wall_ms)
    asyncio.run(caller.limiter.start())
    return caller


def test_a_gateway_that_never_was_starts_full(tmp_path):
    caller = gateway(tmp_path / "limits.json")
    assert not caller.limiter.is_degraded
    caller.acquire(TOKENS, tokens=600)


def test_a_gateway_without_a_file_starts_full_and_keeps_nothing():
    caller = gateway(None)
    assert not caller.limiter.is_degraded
    asyncio.run(caller.limiter.close())


def test_a_gateway_that_was_killed_starts_empty_and_says_so_for_a_minute(tmp_path):
    gateway(tmp_path / "limits.json")
    caller = gateway(tmp_path / "limits.json")
    with pytest.raises(RateLimited) as caught:
        caller.acquire(TOKENS, tokens=1)
    assert caught.value.is_degraded
    caller.now += 30_000
    caller.acquire(TOKENS, tokens=300)
    assert caller.standing(TOKENS).remaining == 0
    caller.now += 30_000
    assert not caller.limiter.is_degraded


def test_a_gateway_that_ended_cleanly_is_gone_on_with(tmp_path):
    path = tmp_path / "limits.json"
    first = gateway(path)
    grant = first.acquire(TOKENS, SEATS, tokens=600, lifetime_ms=40_000)
    assert [standing.holders for standing in grant.standings] == [(), ()]
    first.now += 10_000
    asyncio.run(first.limiter.close())
    second = Caller(path=path, wall_clock=lambda: WALL_MS + 20_000)
    second.now = 5
    asyncio.run(second.limiter.start())
    assert not second.limiter.is_degraded
    assert second.standing(TOKENS).remaining == 300
    assert second.standing(TOKENS).holders[0].expires_ms == 10_000
    assert second.standing(SEATS).remaining == 1
    second.now += 10_000
    assert second.standing(SEATS).remaining == 2
    asyncio.run(second.limiter.close())
    assert gateway(path, WALL_MS + 20_000).standing(TOKENS).remaining == 400
    assert gateway(path).limiter.is_degraded


def test_a_clock_that_was_set_back_between_two_gateways_gives_nothing_away(tmp_path):
    path = tmp_path / "limits.json"
    first = gateway(path)
    first.acquire(TOKENS, tokens=600)
    asyncio.run(first.limiter.close())
    second = gateway(path, WALL_MS - 3_600_000)
    assert second.standing(TOKENS).remaining == 0
    assert second.standing(TOKENS).reset_ms == 60_000


def test_a_file_that_cannot_be_read_is_a_lost_state(tmp_path):
    (tmp_path / "limits.json").write_text('{"wall_ms": 1')
    assert gateway(tmp_path / "limits.json").limiter.is_degraded
