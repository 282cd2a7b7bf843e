"""Several gateways in one process, on a real Redis whose failures the tests choose."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.limits.bucket import WINDOW_MS
from server.limits.redis_calls import SCRIPT, StateUnavailable
from server.limits.rules import Grant, Limit, RateLimited
from server.limits.shared import SharedLimiter

REQUESTS = Limit("requests", "tenant", "t", 6)
TOKENS = Limit("tokens", "tenant", "t", 600)
SEATS = Limit("concurrency", "tenant", "t", 4)
ONE_SEAT = Limit("concurrency", "tenant", "t", 1)
LIMITS = (REQUESTS, TOKENS, SEATS)
LIFETIME_MS = 120_000


class FailingRedis:
    """One gateway's Redis. fault: None, "unheard" (calls do not arrive) or "unanswered"."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.fault = None

    async def evaluate(self, keys, arguments, *, is_patient=False):
        if self.fault == "unheard":
            raise StateUnavailable
        command, _, *rest = arguments
        found = self.fleet.redis.eval(SCRIPT, len(keys), *keys, command, self.fleet.now, *rest)
        if self.fault == "unanswered":
            raise StateUnavailable
        return found

    async def close(self):
        pass


@dataclass
class Request:
    gateway: int
    grant: Grant
    began_ms: int
    tokens: int
    ends_ms: int


class Fleet:
    """Gateways and their requests. upsets: when something happened that may let requests pass."""

    def __init__(self, redis, num_gateways):
        self.redis = redis
        redis.flushall()
        self.now = 10**12
        self.numbers = itertools.count()
        self.loop = asyncio.new_event_loop()
        self.requests: list[Request] = []
        self.open: list[Request] = []
        self.upsets: list[int] = []
        self.num_gateways = num_gateways
        self.gateways = [self.make_gateway(which) for which in range(num_gateways)]
        self.beat()

    def make_gateway(self, which, fault=None):
        redis = FailingRedis(self)
        redis.fault = fault
        limiter = SharedLimiter(
            "test",
            redis,
            f"g{next(self.numbers)}",
            place=(which, self.num_gateways),
            clock=lambda: self.now,
        )
        self.run(limiter.start())
        return limiter, redis

    def run(self, coming):
        return self.loop.run_until_complete(coming)

    def beat(self, times=1):
        for limiter, _ in self.gateways * times:
            self.run(limiter.beat())

    def fail(self, fault, which=None):
        """Set the fault of one gateway's Redis, or of everyone's."""
        for _, redis in self.gateways if which is None else [self.gateways[which]]:
            redis.fault = fault

    def wipe(self):
        self.upset()
        self.redis.flushall()

    def upset(self):
        self.upsets.append(self.now)

    def is_counting(self):
        """Whether each gateway counts in Redis."""
        return [limiter._redis_counts.is_set() for limiter, _ in self.gateways]

    def admit(self, which, tokens=1, limits=LIMITS):
        """Acquire a grant at a gateway, which begins a request. Raises RateLimited."""
        limiter, _ = self.gateways[which]
        name = f"request-{next(self.numbers)}"
        coming = limiter.acquire(name, limits, tokens=tokens, lifetime_ms=LIFETIME_MS)
        grant = self.run(coming)
        tokens = min(tokens, TOKENS.amount)
        request = Request(which, grant, self.now, tokens, self.now + LIFETIME_MS)
        self.requests.append(request)
        self.open.append(request)
        return request

    def end(self, request, used):
        self.open.remove(request)
        request.tokens = min(request.tokens, used)
        self.gateways[request.gateway][0].release(request.grant, used)

    def flush(self):
        for limiter, redis in self.gateways:
            if redis.fault is None:
                self.run(limiter.flush())

    def kill(self, which):
        """Replace a gateway by a new one; the old one's requests run until their time is over."""
        for request in self.open:
            if request.gateway == which:
                request.gateway = -1
        self.upset()
        self.gateways[which] = self.make_gateway(which, self.gateways[which][1].fault)

    def check(self, factor):
        """Check that each limit was passed by its amount at most, once for each upset.

        factor: 2 if gateways count in Redis and by themselves at a time.
        """
        self.open = [request for request in self.open if request.ends_ms > self.now]
        upsets = sum(at_ms >= self.now - LIFETIME_MS for at_ms in self.upsets)
        assert len(self.open) <= SEATS.amount * (factor + upsets)
        for first, last in itertools.combinations_with_replacement(range(len(self.requests)), 2):
            window = self.requests[first : last + 1]
            since_ms, until_ms = window[0].began_ms, window[-1].began_ms
            upsets = sum(since_ms - WINDOW_MS <= at_ms <= until_ms for at_ms in self.upsets)
            room = factor * (WINDOW_MS + until_ms - since_ms) + upsets * WINDOW_MS
            assert sum(request.tokens for request in window) * WINDOW_MS <= TOKENS.amount * room
            assert len(window) * WINDOW_MS <= REQUESTS.amount * room


@pytest.fixture
def make_fleet(redis_server):
    fleets = []

    def make(num_gateways=2):
        fleets.append(Fleet(redis_server.client, num_gateways))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.loop.close()


def test_two_gateways_have_one_limit_between_them(make_fleet):
    fleet = make_fleet()
    for which in (0, 1, 0, 1):
        fleet.admit(which, tokens=10)
    with pytest.raises(RateLimited) as caught:
        fleet.admit(0, tokens=10)
    assert (caught.value.limit, caught.value.is_degraded) == (SEATS, False)
    fleet.end(fleet.open[0], 10)
    fleet.flush()
    fleet.admit(1, tokens=10)


@pytest.mark.parametrize("fault", ["unheard", "unanswered"])
def test_when_redis_does_not_answer_each_gateway_counts_its_part(make_fleet, fault):
    fleet = make_fleet()
    grant = fleet.admit(0, 100, [TOKENS]).grant
    fleet.fail(fault)
    assert fleet.admit(0, 50, [TOKENS]).grant.standings[0].limit == TOKENS
    fleet.admit(0, 150, [TOKENS])
    with pytest.raises(RateLimited) as caught:
        fleet.admit(0, 1, [TOKENS])
    assert (caught.value.limit, caught.value.is_degraded) == (TOKENS, True)
    (standing,) = fleet.run(fleet.gateways[0][0].standings([TOKENS]))
    assert (standing.remaining, standing.holders[0].request_id) == (0, grant.request_id)
    assert grant.standings[0].holders == (), "only `standings` lists them"
    fleet.admit(1, 300, [TOKENS])
    with pytest.raises(RateLimited):
        fleet.run(fleet.gateways[1][0].check([TOKENS]))


def test_a_request_of_before_frees_the_seat_that_it_has_in_its_gateways_part(make_fleet):
    fleet = make_fleet()
    before = [fleet.admit(0, 1, [SEATS]) for _ in range(2)]
    fleet.fail("unheard")
    with pytest.raises(RateLimited):
        fleet.admit(0, 1, [SEATS])
    fleet.end(before[0], 1)
    fleet.admit(0, 1, [SEATS])
    fleet.fail(None)
    fleet.beat(3)
    fleet.flush()
    (standing,) = fleet.run(fleet.gateways[1][0].standings([SEATS]))
    assert [each.request_id for each in standing.holders] == [before[1].grant.request_id]


def test_parts_add_up_to_the_whole_also_of_one_seat(make_fleet):
    fleet = make_fleet(3)
    fleet.fail("unheard")
    for which in (0, 1):
        with pytest.raises(RateLimited) as caught:
            fleet.admit(which, 1, [ONE_SEAT])
        assert caught.value.is_degraded
    fleet.admit(2, 1, [ONE_SEAT])


def test_no_gateway_has_less_than_nothing_after_it_had_the_others_parts(make_fleet):
    fleet = make_fleet()
    for _ in range(10):
        fleet.end(fleet.admit(0, 600, [TOKENS]), 600)
        fleet.now += WINDOW_MS
    fleet.fail("unheard")
    fleet.now += WINDOW_MS
    fleet.admit(0, 300, [TOKENS])


def test_what_redis_charged_without_an_answer_is_given_back(make_fleet):
    fleet = make_fleet()
    fleet.fail("unanswered", 0)
    fleet.admit(0, 300, [TOKENS, SEATS])
    with pytest.raises(RateLimited):
        fleet.admit(0, 300, [TOKENS, SEATS])
    fleet.fail(None)
    fleet.beat(3)
    fleet.flush()
    found = fleet.run(fleet.gateways[1][0].standings([TOKENS, SEATS]))
    assert [standing.remaining for standing in found] == [600, 4]


def test_three_beats_that_redis_answers_bring_it_back(make_fleet):
    fleet = make_fleet()
    fleet.fail("unheard")
    fleet.beat()
    assert fleet.is_counting() == [False, False]
    assert all(limiter.is_degraded for limiter, _ in fleet.gateways)
    for fault in (None, None, "unheard", None, None):
        fleet.fail(fault)
        fleet.beat()
        assert fleet.is_counting() == [False, False]
    fleet.beat()
    assert fleet.is_counting() == [True, True]
    assert not any(limiter.is_degraded for limiter, _ in fleet.gateways)
    fleet.admit(0, 600)


def test_rates_of_a_redis_that_was_wiped_begin_as_if_they_were_used_up(make_fleet):
    fleet = make_fleet()
    fleet.admit(0, 100, [TOKENS])
    fleet.redis.flushall()
    with pytest.raises(RateLimited) as caught:
        fleet.admit(1, 1, [TOKENS])
    assert caught.value.is_degraded
    fleet.now += WINDOW_MS - 1
    assert fleet.gateways[1][0].is_degraded
    fleet.now += 1
    assert not fleet.gateways[1][0].is_degraded
    fleet.admit(1, 600, [TOKENS])


def test_a_gateway_that_is_silent_for_long_is_no_longer_counted(make_fleet):
    fleet = make_fleet(3)
    fleet.now += 10_000
    for limiter, _ in fleet.gateways[:2]:
        fleet.run(limiter.beat())
    fleet.run(fleet.gateways[0][0].beat())
    fleet.fail("unheard")
    for limiter, _ in fleet.gateways[:2]:
        (standing,) = fleet.run(limiter.standings([TOKENS]))
        assert standing.remaining == 300


def test_a_gateway_that_starts_without_redis_shares_with_those_of_its_machine(make_fleet):
    fleet = make_fleet()
    fleet.fail("unheard")
    fleet.kill(0)
    (standing,) = fleet.run(fleet.gateways[0][0].standings([TOKENS]))
    assert standing.remaining == 300


def test_nothing_that_is_limited_asks_nobody(make_fleet):
    fleet = make_fleet(1)
    fleet.fail("unheard")
    assert not fleet.admit(0, 10**6, ()).grant.is_in_redis
    assert fleet.is_counting() == [True]


which = st.integers(0, 2)
faults = st.sampled_from([None, "unheard", "unanswered"])
events = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), which, st.sampled_from([0, 10, 100, 300, 700])),
        st.tuples(st.just("acquire"), which, st.sampled_from([0, 10, 100, 300, 700])),
        st.tuples(st.just("seat"), which, st.just(0)),
        st.tuples(st.just("seat"), which, st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([0, 50, 300, 900])),
        st.tuples(st.just("time"), st.sampled_from([100, 3000, 11_000, 40_000]), st.just(0)),
        st.tuples(st.just("fault"), which, faults),
        st.tuples(st.just("beat"), st.sampled_from([1, 3]), st.just(0)),
        st.tuples(st.just("wipe"), st.just(0), st.just(0)),
        st.tuples(st.just("kill"), which, st.just(0)),
    ),
    max_size=50,
)


def play(fleet, script, *, fails_apart):
    """Do a script's events. fails_apart: whether each gateway has faults of its own."""
    for kind, first, second in script:
        counting, which = fleet.is_counting(), first % len(fleet.gateways)
        if kind in ("acquire", "seat"):
            with suppress(RateLimited):
                fleet.admit(which, second, [SEATS] if kind == "seat" else LIMITS)
        elif kind == "end":
            mine = [request for request in fleet.open if request.gateway >= 0]
            if mine:
                fleet.end(mine[first % len(mine)], second)
        elif kind == "time":
            fleet.now += first
        elif kind == "fault":
            fleet.fail(second, which if fails_apart else None)
            fleet.beat(1 if second else 3)
        elif kind == "beat":
            fleet.beat(first)
        elif kind == "wipe":
            fleet.wipe()
        elif kind == "kill":
            fleet.kill(which)
            fleet.beat()
        fleet.flush()
        if fleet.is_counting() != counting:
            fleet.upset()
        fleet.check(2 if fails_apart else 1)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=events, num_gateways=st.integers(2, 3), fails_apart=st.booleans())
def test_what_fails_lets_no_more_pass_a_limit_than_its_amount(
    redis_server, script, num_gateways, fails_apart
):
    """The whole amount is there again in the end: none is refused for good."""
    fleet = Fleet(redis_server.client, num_gateways)
    try:
        play(fleet, script, fails_apart=fails_apart)
        fleet.fail(None)
        fleet.beat(3)
        for request in [*fleet.open]:
            if request.gateway >= 0:
                fleet.end(request, 0)
        fleet.flush()
        # Requests of gateways that were killed have expired by then, and debts are paid.
        fleet.now += LIFETIME_MS + 100 * WINDOW_MS
        fleet.admit(0, 600)
        assert not fleet.gateways[0][0].is_degraded
    finally:
        fleet.loop.close()
