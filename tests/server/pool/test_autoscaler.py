"""The autoscaler's number of engines, on a simulated pool whose engines start slowly."""

import math
from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.retired import RetiredCore
from server.pool.autoscaler import (
    SPARE_S,
    SPARE_SHARE,
    WAIT_S,
    Autoscaler,
    PoolFigures,
    pool_figures,
)
from server.pool.first_tokens import WINDOW_S

SEATS = 8
SLO_S = 2.0


def make_autoscaler(least=1, most=10, wanted=None):
    return Autoscaler(least=least, most=most, wanted=wanted or least, slo_first_token_s=SLO_S)


class Pool:
    """Engines that are ready `start_s` after they are wanted and go at once; time passes in steps.

    speed: requests per engine above which first tokens are late, whatever the number of seats.
    """

    def __init__(self, autoscaler, start_s=20.0, speed=SEATS):
        self.autoscaler = autoscaler
        self.start_s = start_s
        self.speed = speed
        self.now_s = 1000.0
        self.ready_at = [self.now_s] * autoscaler.wanted
        self.late_at = -math.inf
        self.history = [autoscaler.wanted]

    @property
    def num_ready(self):
        return sum(at <= self.now_s for at in self.ready_at)

    def figures(self, num_requests):
        if num_requests > self.speed * self.num_ready:
            self.late_at = self.now_s
        is_late = self.now_s - self.late_at < WINDOW_S
        return PoolFigures(
            num_ready=self.num_ready,
            num_requests=num_requests,
            num_waiting=max(0, num_requests - SEATS * self.num_ready),
            seats=SEATS,
            first_token_s=3 * SLO_S if is_late else SLO_S / 3,
        )

    def pass_time(self, duration_s, num_requests):
        for _ in range(int(duration_s)):
            self.now_s += 1.0
            wanted = self.autoscaler.decide(self.now_s, self.figures(num_requests))
            while len(self.ready_at) < wanted:
                self.ready_at.append(self.now_s + self.start_s)
            del self.ready_at[wanted:]
            self.history.append(wanted)

    @property
    def changes(self):
        """Differences of the decisions that changed the number, such as +1, +3, -1."""
        pairs = zip(self.history, self.history[1:], strict=False)
        return [after - before for before, after in pairs if after != before]

    @property
    def num_turns(self):
        directions = [change > 0 for change in self.changes]
        return sum(a != b for a, b in zip(directions, directions[1:], strict=False))


# ---- up ----


def test_a_queue_that_lasts_gets_all_the_engines_that_it_needs_at_once():
    pool = Pool(make_autoscaler(), speed=1000)
    pool.pass_time(WAIT_S, 30)
    assert pool.changes == [], "the queue may be short-lived"
    pool.pass_time(1, 30)
    assert pool.changes == [3]
    assert pool.autoscaler.reason == "requests wait for a seat, 22 at last count"


def test_a_queue_that_comes_and_goes_changes_nothing():
    pool = Pool(make_autoscaler(), speed=1000)
    for _ in range(20):
        pool.pass_time(WAIT_S - 1, 12)
        pool.pass_time(1, 8)
    assert pool.changes == []


@settings(max_examples=20, deadline=None)
@given(start_s=st.floats(0, 900), num_requests=st.integers(9, 80))
def test_an_engine_on_its_way_is_counted_once(start_s, num_requests):
    pool = Pool(make_autoscaler(), start_s)
    pool.pass_time(start_s + 120, num_requests)
    assert pool.changes == [math.ceil(num_requests / SEATS) - 1]


def test_first_tokens_that_are_late_get_one_engine_after_the_other():
    pool = Pool(make_autoscaler(), start_s=10.0, speed=2)
    pool.pass_time(600, 7)
    assert pool.changes == [1, 1, 1], "7 requests need 4 engines of 2"


def test_late_first_tokens_of_requests_that_had_engines_for_themselves_change_nothing():
    pool = Pool(make_autoscaler(least=2), speed=0)
    pool.pass_time(600, 2)
    assert pool.changes == []


def test_without_an_engine_that_answers_nothing_is_known_and_nothing_decided():
    autoscaler = make_autoscaler(least=1, most=5, wanted=3)
    for now_s in range(2000):
        assert autoscaler.decide(float(now_s), pool_figures([])) == 3


# ---- down ----


def test_what_has_not_been_needed_for_minutes_goes_one_by_one():
    pool = Pool(make_autoscaler(most=5, wanted=5))
    pool.pass_time(SPARE_S, 0)
    assert pool.changes == []
    pool.pass_time(SPARE_S, 0)
    assert pool.changes == [-1], "each has its own minutes"
    pool.pass_time(9 * SPARE_S, 0)
    assert pool.changes == [-1, -1, -1, -1]


def test_a_busy_minute_puts_it_off():
    pool = Pool(make_autoscaler(most=3, wanted=3))
    for _ in range(10):
        pool.pass_time(SPARE_S - 60, 0)
        pool.pass_time(1, 2 * SEATS)
    assert pool.changes == []


def test_nobody_goes_while_somebody_starts():
    autoscaler = make_autoscaler(most=4, wanted=4)
    figures = PoolFigures(num_ready=3, num_requests=0, num_waiting=0, seats=SEATS)
    for now_s in range(2000):
        assert autoscaler.decide(float(now_s), figures) == 4


def test_what_was_too_few_is_not_tried_again_for_as_many():
    pool = Pool(make_autoscaler(), start_s=10.0, speed=2)
    pool.pass_time(4 * 3600, 7)
    assert pool.changes == [1, 1, 1]
    pool.pass_time(2 * SPARE_S, 3)
    assert pool.history[-1] < 4, "fewer engines are tried for fewer requests"


def test_what_was_too_few_says_nothing_of_larger_numbers():
    pool = Pool(make_autoscaler(), speed=2)
    pool.pass_time(300, 3)
    assert pool.history[-1] == 2
    pool.speed = 1000
    pool.pass_time(60, 4 * SEATS)
    assert pool.history[-1] == 4
    pool.pass_time(4 * SPARE_S, 5)
    assert pool.history[-1] == 2


# ---- laws ----

any_figures = st.builds(
    PoolFigures,
    num_ready=st.integers(0, 12),
    num_requests=st.integers(0, 10_000),
    num_waiting=st.integers(0, 10_000),
    seats=st.integers(1, 64),
    first_token_s=st.none() | st.floats(0, 100),
)


@settings(max_examples=80, deadline=None)
@given(
    bounds=st.lists(st.integers(1, 12), min_size=3, max_size=3).map(sorted),
    steps=st.lists(st.tuples(st.floats(0, 400), any_figures), max_size=60),
)
def test_whatever_is_seen_the_answer_is_within_bounds(bounds, steps):
    least, wanted, most = bounds
    autoscaler, now_s = make_autoscaler(least, most, wanted), 0.0
    for passed_s, figures in steps:
        now_s += passed_s
        before = autoscaler.wanted
        after = autoscaler.decide(now_s, figures)
        assert least <= after <= most
        assert after >= before - 1
        if after < before:
            assert figures.num_requests <= SPARE_SHARE * after * figures.seats
            assert figures.num_ready >= before


@settings(max_examples=20, deadline=None)
@given(
    num_requests=st.integers(0, 100),
    most=st.integers(1, 12),
    wanted=st.integers(1, 12),
    start_s=st.floats(0, 120),
    speed=st.integers(1, SEATS),
)
def test_a_constant_load_gets_what_it_needs_and_then_nothing_changes(
    num_requests, most, wanted, start_s, speed
):
    pool = Pool(make_autoscaler(most=most, wanted=wanted), start_s, speed)
    pool.pass_time(2 * 3600, num_requests)
    needed = max(1, math.ceil(num_requests / speed))
    # If each request has an engine for itself, it is late for another reason.
    assert pool.autoscaler.wanted >= min(needed, most, max(1, num_requests))
    assert pool.num_turns <= 1, pool.changes
    num_changes = len(pool.changes)
    pool.pass_time(1800, num_requests)
    assert len(pool.changes) == num_changes


@settings(max_examples=20, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 100)), min_size=1, max_size=12),
    start_s=st.floats(0, 120),
)
def test_nobody_goes_who_was_needed_in_the_last_minutes(loads, start_s):
    pool = Pool(make_autoscaler(most=12), start_s)
    requests = [0]
    for duration_s, num_requests in loads:
        pool.pass_time(duration_s, num_requests)
        requests += [num_requests] * duration_s
        # pool.history has a decision for each second; `requests` has the load that it saw.
    for i, (before, after) in enumerate(zip(pool.history, pool.history[1:], strict=False)):
        if after < before:
            seen = requests[max(0, i + 1 - int(SPARE_S)) : i + 2]
            assert max(seen) <= SPARE_SHARE * after * SEATS


# ---- the gateway's figures ----


def make_engine(state="ready", running=0, waiting=0, seats=SEATS, **stats):
    journal = SimpleNamespace(num_unsettled=0)
    idle = RetiredCore(journal, 0.0).take_stats()
    stats = {"total_slabs": 100, "free_slabs": 50, **stats}
    return SimpleNamespace(
        state=state,
        stats=replace(idle, running=running, waiting=waiting, **stats),
        welcome=SimpleNamespace(max_num_seqs=seats),
    )


def test_only_engines_that_take_requests_count():
    away = make_engine(running=9)
    away.stats = None
    engines = [
        make_engine(running=8, waiting=3),
        make_engine(running=2),
        make_engine("leaving", running=5, waiting=5),
        make_engine("starting", running=7),
        away,
    ]
    assert pool_figures(engines, 1.5) == PoolFigures(
        num_ready=2, num_requests=13, num_waiting=3, seats=SEATS, first_token_s=1.5
    )


def test_who_waits_beside_free_seats_and_free_room_waits_for_an_adapter():
    assert pool_figures([make_engine(running=3, waiting=2)]).num_waiting == 0
    full = make_engine(running=3, waiting=2, free_slabs=2, prefix_slabs=1)
    assert pool_figures([full]).num_waiting == 2
