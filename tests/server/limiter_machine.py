"""Compares limiters with the model over random sequences of everything that happens to limits."""

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.limits.calls import Call
from server.limits.rules import Grant, Limit
from tests.server.limiter_model import Log

AMOUNTS = {
    ("requests", "tenant", "t"): 7,
    ("tokens", "tenant", "t"): 1000,
    ("concurrency", "tenant", "t"): 3,
    ("tokens", "key", "k"): 133,
    ("concurrency", "adapter", "a"): 1,
    ("requests", "base", "t/org/small"): 5,
}
KEYS = list(AMOUNTS)
BORN_MS = 1_000_000_000_000

# Most charges and steps are small against a minute's amount, so that charges are open together.
some_keys = st.sampled_from(
    [{KEYS[0]}, {KEYS[1]}, {KEYS[3]}, {KEYS[1]}, {KEYS[3]}, {KEYS[2], KEYS[4]}, {*KEYS}]
)
tokens = st.sampled_from([0, 5, 30, 60, 60, 133, 400, 5000])
leases_ms = st.sampled_from([500, 20_000, 200_000, 200_000, 200_000])
steps_ms = st.sampled_from([1, 17, 999, 1000, 3571, 8571, 8571, 20_000, 10**9])


TOKENS = Limit("tokens", "tenant", "t", 600)

# Rounds: (requested tokens, pause in ms, [(open request to release, its used tokens)]).
refunds = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1, 50, 100, 200, 300, 500]), max_size=3),
        st.sampled_from([0, 4000, 9000, 20_000, 45_000, 55_000]),
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 0, 50])), max_size=3),
    ),
    max_size=8,
)

# Two late refunds for which a limiter without memory of the first counts the same refill twice.
LATE_REFUNDS = [([100, 500], 55_000, []), ([500, 50], 0, [(0, 0), (1, 0)])]


def check_refunds(subject, rounds):
    """Check that `subject` equals the model for many open charges of one limit, in any order."""
    now, log, open_ones = BORN_MS + 60_000, Log(BORN_MS, [(BORN_MS, TOKENS.amount)]), []
    numbers = itertools.count()
    for asked, wait_ms, released in rounds:
        for tokens in asked:
            name = f"{next(numbers)}"
            wait = log.wait(False, TOKENS.amount, tokens, now)
            log.at = now
            assert subject.acquire(Call("acquire", (TOKENS,), tokens, name, 10**7), now) == [wait]
            if not wait:
                log.charge(name, tokens, 10**7)
                open_ones.append(name)
        now += wait_ms
        for which, used in released if open_ones else ():
            name = open_ones[which % len(open_ones)]
            grant = Grant(request_id=name, limits=(TOKENS,), standings=())
            log.release(name, used, now)
            subject.release(grant, used, now)
            (standing,) = subject.standings([TOKENS], now, with_holders=False)
            assert standing.reset_ms == -(-log.backlog(now) // 600)


def check_expiry(subject):
    """Check that a release at a charge's expiry has no effect, and one a millisecond before has."""
    now, grants = BORN_MS + 60_000, []
    for name, lifetime_ms in (("late", 1000), ("in time", 1001)):
        assert subject.acquire(Call("acquire", (TOKENS,), 200, name, lifetime_ms), now) == [0]
        grants.append(Grant(request_id=name, limits=(TOKENS,), standings=()))
    for grant, backlog in zip(grants, (390, 190), strict=True):
        subject.release(grant, 0, now + 1000)
        (standing,) = subject.standings([TOKENS], now + 1000, with_holders=False)
        assert standing.reset_ms == backlog * 100


class LimiterMachine(RuleBasedStateMachine):
    """A limiter against the model. subject: has the methods of `States`; subclasses make it."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = self.make_subject()
        self.now = BORN_MS + 60_000
        self.logs: dict[tuple[str, str, str], Log] = {}
        self.amounts = dict(AMOUNTS)
        self.num_requests = 0
        self.open: list[tuple[Grant, int]] = []

    def make_subject(self):
        raise NotImplementedError

    @property
    def limits(self):
        return [Limit(*key, amount) for key, amount in self.amounts.items()]

    def log(self, limit):
        first = Log(BORN_MS, [(BORN_MS, limit.amount)])
        return self.logs.get(limit_key(limit), first)

    @initialize(ms=st.sampled_from([0, 25_000, 60_000]))
    def it_was_born(self, ms):
        self.now = BORN_MS + ms

    @rule(ms=steps_ms)
    def time_passes(self, ms):
        self.now += ms

    @rule(ms=st.sampled_from([1, 3000, 70_000]))
    def the_clock_jumps_back(self, ms):
        self.now = max(BORN_MS, self.now - ms)

    @rule(key=st.sampled_from(KEYS), percent=st.sampled_from([0, 50, 100, 100, 300]))
    def an_amount_changes(self, key, percent):
        self.amounts[key] = AMOUNTS[key] * percent // 100

    @rule(keys=some_keys, tokens=tokens, lifetime_ms=leases_ms)
    def acquire(self, keys, tokens, lifetime_ms):
        self.ask(keys, tokens, lifetime_ms)

    @rule(tokens=tokens)
    def acquire_tokens(self, tokens):
        self.ask({KEYS[1]}, tokens, 200_000)

    def ask(self, keys, tokens, lifetime_ms):
        limits = [limit for limit in self.limits if limit_key(limit) in keys]
        self.num_requests += 1
        request_id = f"request-{self.num_requests}"
        expected = []
        for limit in limits:
            log = self.logs.setdefault(limit_key(limit), self.log(limit))
            log.at = max(log.at, self.now)
            log.amounts.append((log.at, limit.amount))
            expected.append(self.wait(limit, limit.units(tokens)))
        call = Call("acquire", tuple(limits), tokens, request_id, lifetime_ms)
        assert self.subject.acquire(call, self.now) == expected
        if any(expected):
            return
        for limit in limits:
            units = limit.units(tokens)
            self.logs[limit_key(limit)].charge(request_id, units, lifetime_ms)
        grant = Grant(request_id=request_id, limits=call.limits, standings=())
        self.open.append((grant, tokens))

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 100),
        percent=st.sampled_from([None, 0, 0, 30, 100, 150]),
        again=st.sampled_from([False, False, True]),
    )
    def release(self, which, percent, again):
        grant, tokens = opened = self.open[which % len(self.open)]
        used = None if percent is None else tokens * percent // 100
        if not again:
            # If kept, it may be released twice, as by a gateway that did not get the answer.
            self.open.remove(opened)
        for limit in grant.limits:
            units = limit.units(used)
            self.logs[limit_key(limit)].release(grant.request_id, units, self.now)
        self.subject.release(grant, used, self.now)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def its_gateway_dies(self, which):
        self.open.pop(which % len(self.open))

    @invariant()
    def it_says_what_the_model_says(self):
        units = [limit.units(7) for limit in self.limits]
        expected = [self.wait(*asked) for asked in zip(self.limits, units, strict=True)]
        assert self.subject.check(Call("check", tuple(self.limits), 7), self.now) == expected
        found = self.subject.standings(self.limits, self.now, with_holders=True)
        for limit, standing in zip(self.limits, found, strict=True):
            self.compare(limit, standing)

    def compare(self, limit, standing):
        log = self.log(limit)
        holders = log.holders(self.now)
        assert standing.limit == limit
        assert [(h.request_id, h.units, h.expires_ms) for h in standing.holders] == holders
        if limit.metric == "concurrency":
            assert standing.remaining == max(0, limit.amount - len(holders))
            assert standing.reset_ms == min((end for _, _, end in holders), default=0)
            return
        backlog = log.backlog(self.now)
        assert standing.remaining == max(0, (limit.amount * 60_000 - backlog) // 60_000)
        if limit.amount:
            # The whole amount is available after that time and not a millisecond earlier.
            assert standing.reset_ms == log.wait(False, limit.amount, limit.amount, self.now)

    def wait(self, limit, units):
        return self.log(limit).wait(limit.metric == "concurrency", limit.amount, units, self.now)


def limit_key(limit):
    return limit.metric, limit.scope, limit.scope_id
