"""Several gateways in one process, on a real Redis whose failures the tests choose."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.tables import metadata
from server.billing.holds import open_requests
from server.billing.tables import holds
from server.limits.bucket import WINDOW_MS
from server.limits.epochs import ALIVE_MS, Epoch, Epochs, StaleEpoch, check
from server.limits.redis_calls import StateUnavailable
from server.limits.redis_states import SCRIPT
from server.limits.rules import Grant, Limit, RateLimited
from server.limits.shared import SharedLimiter
from server.limits.tables import gateways, limiter_epochs

REQUESTS = Limit("requests", "tenant", "t", 6)
TOKENS = Limit("tokens", "tenant", "t", 600)
SEATS = Limit("concurrency", "tenant", "t", 4)
LIMITS = (REQUESTS, TOKENS, SEATS)
LIFETIME_MS = 120_000


class OneConnection:
    """A database in memory with the methods of `Database`."""

    def __init__(self):
        engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
        self.conn = engine.connect()
        metadata.create_all(self.conn, [holds, gateways, limiter_epochs])

    async def read(self, fn):
        return fn(self.conn)

    async def write(self, fn):
        with self.conn.begin_nested():
            return fn(self.conn)


class FailingRedis:
    """One gateway's Redis. fault: None, "unheard" (calls do not arrive) or "unanswered"."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.fault = None

    async def run(self, prefix, call):
        keys = call.keys(prefix)
        arguments = replace(call, clock_ms=self.fleet.now).arguments()
        return call.read(self._do(lambda r: r.eval(SCRIPT, len(keys), *keys, *arguments)))

    async def begin(self, prefix, *, is_first):
        self._do(lambda redis: redis.set(f"{prefix}:born", 1 if is_first else 0, nx=True))

    async def ping(self):
        self._do(lambda redis: None)

    async def close(self):
        pass

    def _do(self, ask):
        if self.fault == "unheard":
            raise StateUnavailable
        answer = ask(self.fleet.redis)
        if self.fault == "unanswered":
            raise StateUnavailable
        return answer


@dataclass
class Request:
    gateway: int
    grant: Grant
    charged_ms: int
    tokens: int
    ends_ms: int
    is_admitted: bool = False
    num_requests: int = 1


class Fleet:
    """Gateways, their grants, and the requests made of these."""

    def __init__(self, redis, num_gateways):
        self.redis = redis
        redis.flushall()
        self.now = 10**12
        self.numbers = itertools.count()
        self.database = OneConnection()
        self.loop = asyncio.new_event_loop()
        self.requests: list[Request] = []
        self.open: list[Request] = []
        self.granted: list[Request] = []
        self.gateways: list[tuple[SharedLimiter, FailingRedis]] = []
        for _ in range(num_gateways):
            self.gateways.append(self.make_gateway())

    def make_gateway(self):
        redis = FailingRedis(self)
        epochs = Epochs(
            self.database, f"g{next(self.numbers)}", open_requests, clock=lambda conn: self.now
        )
        limiter = SharedLimiter(
            "test",
            redis,
            epochs,
            max_lifetime_ms=LIFETIME_MS,
            clock=lambda: self.now,
            wall_ms=lambda: self.now,
        )
        self.run(limiter.start())
        return limiter, redis

    def run(self, coming):
        return self.loop.run_until_complete(coming)

    @property
    def epoch(self):
        row = self.database.conn.execute(sa.select(limiter_epochs)).one()
        return Epoch(row.epoch, row.mode, row.num_gateways, row.since_ms)

    def acquire(self, which, tokens=1, limits=LIMITS, lifetime_ms=LIFETIME_MS):
        """Acquire a grant at a gateway. Raises RateLimited."""
        limiter, _ = self.gateways[which]
        coming = limiter.acquire(
            f"request-{next(self.numbers)}", limits, tokens=tokens, lifetime_ms=lifetime_ms
        )
        grant = self.run(coming)
        tokens = min(tokens, TOKENS.amount)
        request = Request(which, grant, self.now, tokens, self.now + lifetime_ms)
        self.granted.append(request)
        return request

    def hold(self, request):
        """Write the hold of a grant, which makes it a request. Raises StaleEpoch."""
        self.granted.remove(request)
        limiter, _ = self.gateways[request.gateway]

        def write(conn):
            check(conn, request.grant.epoch)
            row = dict.fromkeys(column.name for column in holds.c)
            row |= dict.fromkeys((column.name for column in holds.c if not column.nullable), 0)
            row |= {"request_id": request.grant.request_id, "state": "open", "tenant_id": "t"}
            row |= {"expires_at_ms": request.ends_ms}
            conn.execute(sa.insert(holds).values(row))

        try:
            self.run(self.database.write(write))
        except StaleEpoch:
            limiter.release(request.grant, None)
            self.run(limiter.refresh())
            raise
        self.requests.append(request)
        self.open.append(request)

    def admit(self, which, tokens=1, limits=LIMITS):
        """Acquire and hold as a gateway does, again after StaleEpoch. Raises RateLimited."""
        request = self.acquire(which, tokens, limits)
        try:
            self.hold(request)
        except StaleEpoch:
            request = self.acquire(which, tokens, limits)
            self.hold(request)
        return request

    def end(self, request, used):
        self.open.remove(request)
        is_this = holds.c.request_id == request.grant.request_id
        values = {"state": "posted", "resolved_at_ms": self.now}
        self.database.conn.execute(sa.update(holds).where(is_this).values(values))
        request.tokens = min(request.tokens, used)
        self.gateways[request.gateway][0].release(request.grant, used)

    def release(self, which):
        limiter, redis = self.gateways[which]
        if redis.fault is None:
            # The limiter would retry for ever if Redis fails, so it flushes only without a fault.
            self.run(limiter.flush())

    def kill(self, which):
        """Replace a gateway by a new one; the old one's requests run until their time is over."""
        self.granted = [request for request in self.granted if request.gateway != which]
        for request in self.open:
            if request.gateway == which:
                request.gateway = -1
        self.gateways[which] = self.make_gateway()

    def check(self):
        self.open = [request for request in self.open if request.ends_ms > self.now]
        assert len(self.open) <= SEATS.amount
        for first, last in itertools.combinations_with_replacement(range(len(self.requests)), 2):
            window = self.requests[first : last + 1]
            times = [request.charged_ms for request in window]
            room = 60_000 + max(times) - min(times)
            assert sum(request.tokens for request in window) * 60_000 <= TOKENS.amount * room
            assert len(window) * 60_000 <= REQUESTS.amount * room


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
    fleet.release(0)
    fleet.admit(1, tokens=10)
    assert fleet.epoch.number == 1


@pytest.mark.parametrize("fault", ["unheard", "unanswered"])
def test_when_redis_does_not_answer_each_gateway_has_an_empty_share(make_fleet, fault):
    fleet = make_fleet()
    for limiter, redis in fleet.gateways:
        fleet.run(limiter._epochs.beat())
        redis.fault = fault
    with pytest.raises(RateLimited) as caught:
        fleet.admit(0, tokens=600)
    assert caught.value.is_degraded
    assert (fleet.epoch.mode, fleet.epoch.num_gateways) == ("local", 2)
    fleet.now += 30_000
    grant = fleet.admit(0, 150, [TOKENS]).grant
    with pytest.raises(RateLimited):
        fleet.admit(0, 1, [TOKENS])
    (standing,) = fleet.run(fleet.gateways[0][0].standings([TOKENS]))
    assert [holder.request_id for holder in standing.holders] == [grant.request_id]
    assert grant.standings[0].holders == (), "only `standings` lists them"


def test_seats_of_requests_under_way_count_when_the_way_of_counting_changes(make_fleet):
    fleet = make_fleet()
    for limiter, _ in fleet.gateways:
        fleet.run(limiter._epochs.beat())
    first = [fleet.admit(0, 1, [SEATS]) for _ in range(2)]
    for _, redis in fleet.gateways:
        redis.fault = "unheard"
    # Two of four seats are taken, so each of two gateways has one more; but the second reads the
    # open holds after the first took its seat, and gets none.
    fleet.admit(0, 1, [SEATS])
    with pytest.raises(RateLimited):
        fleet.admit(0, 1, [SEATS])
    with pytest.raises(RateLimited):
        fleet.admit(1, 1, [SEATS])
    for request in first:
        fleet.end(request, 1)
    fleet.now += 1000
    fleet.admit(1, 1, [SEATS])
    fleet.check()


def test_a_wiped_redis_starts_empty_with_the_seats_of_the_open_holds(make_fleet):
    fleet = make_fleet()
    held = [fleet.admit(which, 100) for which in (0, 1, 1)]
    fleet.redis.flushall()
    with pytest.raises(RateLimited) as caught:
        fleet.admit(1, 1)
    assert caught.value.is_degraded
    assert (fleet.epoch.number, fleet.epoch.mode) == (2, "redis")
    fleet.now += 20_000
    fleet.admit(0, 200)
    with pytest.raises(RateLimited) as caught:
        fleet.admit(1, 0, [SEATS])
    assert caught.value.limit == SEATS
    # A request that was admitted before the wipe frees its seat in the new epoch, which carried it.
    fleet.end(held[0], 100)
    fleet.release(0)
    fleet.admit(1, 0, [SEATS])


def test_what_was_charged_before_the_way_of_counting_changed_cannot_become_a_request(make_fleet):
    fleet = make_fleet()
    late = fleet.acquire(0, 600)
    fleet.redis.flushall()
    with pytest.raises(RateLimited):
        fleet.acquire(1, 0)
    fleet.now += 60_000
    with pytest.raises(StaleEpoch):
        fleet.hold(late)
    # The gateway acquires again, in the current epoch.
    fleet.hold(fleet.acquire(0, 600))


def test_three_answers_of_redis_bring_it_back_empty(make_fleet):
    fleet = make_fleet()
    for _, redis in fleet.gateways:
        redis.fault = "unheard"
    with pytest.raises(RateLimited):
        fleet.admit(0)
    limiter, redis = fleet.gateways[0]
    for fault in (None, None, "unheard", None, None):
        redis.fault = fault
        fleet.run(limiter.probe())
        assert fleet.epoch.mode == "local"
    fleet.run(limiter.probe())
    assert fleet.epoch.mode == "redis"
    assert limiter.is_degraded, "no request has asked Redis yet"
    with pytest.raises(RateLimited):
        fleet.admit(0)
    fleet.now += WINDOW_MS - 1
    assert limiter.is_degraded
    fleet.now += 1
    assert not limiter.is_degraded, "a minute, however long a request may take"
    fleet.admit(0, 600)
    assert not limiter.is_degraded


def test_a_gateway_that_was_not_counted_takes_no_share(make_fleet):
    fleet = make_fleet(1)
    fleet.gateways[0][1].fault = "unheard"
    with pytest.raises(RateLimited):
        fleet.admit(0)
    assert fleet.epoch.num_gateways == 1
    fleet.now += 5000
    fleet.gateways.append(fleet.make_gateway())
    assert (fleet.epoch.mode, fleet.epoch.num_gateways) == ("local", 2)
    # A gateway that was away for longer than ALIVE_MS does not count either.
    fleet.now += ALIVE_MS
    fleet.gateways.append(fleet.make_gateway())
    assert fleet.epoch.num_gateways == 1
    with pytest.raises(RateLimited):
        fleet.admit(0)
    assert fleet.epoch.num_gateways == 2


def test_a_share_of_less_than_one_is_refused_as_degraded(make_fleet):
    fleet = make_fleet()
    for limiter, redis in fleet.gateways:
        fleet.run(limiter._epochs.beat())
        redis.fault = "unheard"
    with pytest.raises(RateLimited) as caught:
        fleet.admit(0, 1, [Limit("concurrency", "tenant", "t", 1)])
    assert caught.value.is_degraded


def test_nothing_that_is_limited_asks_nobody(make_fleet):
    fleet = make_fleet(1)
    fleet.gateways[0][1].fault = "unheard"
    request = fleet.acquire(0, 10**6, ())
    assert request.grant.epoch is None
    assert fleet.epoch.mode == "redis"


which = st.integers(0, 2)
events = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), which, st.sampled_from([0, 10, 100, 300, 700])),
        st.tuples(st.just("acquire"), which, st.sampled_from([0, 10, 100, 300, 700])),
        st.tuples(st.just("seat"), which, st.just(0)),
        st.tuples(st.just("hold"), which, st.integers(0, 9)),
        st.tuples(st.just("hold"), which, st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([0, 50, 300, 900])),
        st.tuples(st.just("time"), st.sampled_from([100, 3000, 11_000, 40_000]), st.just(0)),
        st.tuples(st.just("fault"), which, st.sampled_from([None, "unheard", "unanswered"])),
        st.tuples(st.just("beat"), which, st.just(0)),
        st.tuples(st.just("probe"), which, st.just(0)),
        st.tuples(st.just("refresh"), which, st.just(0)),
        st.tuples(st.just("wipe"), st.just(0), st.just(0)),
        st.tuples(st.just("kill"), which, st.just(0)),
    ),
    max_size=50,
)


def play(fleet, script):
    seen = Counter()
    for kind, first, second in script:
        limiter, redis = fleet.gateways[first % len(fleet.gateways)]
        if kind in ("acquire", "seat"):
            limits = [SEATS] if kind == "seat" else LIMITS
            try:
                fleet.acquire(first % len(fleet.gateways), second, limits)
            except RateLimited:
                kind = "refused"
        elif kind == "hold" and fleet.granted:
            try:
                fleet.hold(fleet.granted[second % len(fleet.granted)])
            except StaleEpoch:
                kind = "stale"
        elif kind == "end":
            mine = [request for request in fleet.open if request.gateway >= 0]
            if mine:
                fleet.end(mine[first % len(mine)], second)
        elif kind == "time":
            fleet.now += first
        elif kind == "fault":
            redis.fault = second
        elif kind in ("beat", "refresh"):
            fleet.run(getattr(limiter._epochs, kind)())
        elif kind == "probe":
            for _ in range(3):
                fleet.run(limiter.probe())
        elif kind == "wipe":
            fleet.redis.flushall()
        elif kind == "kill":
            fleet.kill(first % len(fleet.gateways))
        for index in range(len(fleet.gateways)):
            fleet.release(index)
        seen[kind] += 1
        fleet.check()
    return seen


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=events, num_gateways=st.integers(2, 3))
def test_whatever_fails_no_limit_is_passed(redis_server, script, num_gateways):
    fleet = Fleet(redis_server.client, num_gateways)
    try:
        play(fleet, script)
    finally:
        fleet.loop.close()
