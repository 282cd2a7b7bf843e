"""Requests that engines may have died of: who is suspected, tried alone, refused and cleared."""

from collections import defaultdict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineDied
from server.pool.suspects import LIFETIME_S, RETRY_S, Suspected, Suspects
from tests.engine.fakes import make_message

ENGINES = ("a", "b")
POISON = "poison"
INNOCENT = ("health check", "question", "another")


class Site:
    """Engines, what they serve, and the suspects of the gateway in front of them."""

    def __init__(self):
        self.now = 1000.0
        self.suspects = Suspects(lambda: self.now)
        self.starts = dict.fromkeys(ENGINES, 0)
        self.served = defaultdict(list)  # by engine: (mark, watch)
        self.refused = []
        self.killed_at = []

    def send(self, mark, engine="a"):
        """Send a request, which begins unless it is refused or has to wait."""
        watch = self.suspects.watch(mark, "ten_1", engine)
        try:
            is_tried = watch.__enter__()
        except Suspected as suspected:
            if suspected.retry_after_s is None:
                self.refused.append(mark)
            return suspected.retry_after_s
        if is_tried:
            if self.served[engine]:
                watch.__exit__(None, None, None)  # it has waited in vain
                return RETRY_S
            self.suspects.is_alone = True
        self.served[engine].append((mark, watch))
        return "served"

    def succeed(self, engine="a"):
        served, self.served[engine] = self.served[engine], []
        for mark, watch in served:
            if mark != POISON:
                self.suspects.clear(mark)
            watch.__exit__(None, None, None)

    def die(self, engine="a"):
        start = f"{engine} {self.starts[engine]}"
        self.starts[engine] += 1
        served, self.served[engine] = self.served[engine], []
        for _, watch in served:
            with suppress(EngineDied):
                watch.__exit__(EngineDied, EngineDied(start), None)

    def kill(self, *marks, engine="a"):
        """Have an engine die of something while it serves these."""
        for mark in marks:
            assert self.send(mark, engine) == "served"
        self.die(engine)

    def states(self):
        return {it.fingerprint: it.state for it in self.suspects.all()}


@pytest.fixture
def site():
    return Site()


def test_two_equal_requests_at_one_death_are_no_suspects(site):
    site.kill("health check", "health check")
    assert site.states() == {}
    assert site.send("health check") == "served"


def test_one_start_dies_once_however_often_its_connection_ends(site):
    site.kill("question")
    site.starts["a"] = 0
    site.kill("question")
    assert site.states() == {}


def test_a_success_between_two_deaths_shows_that_it_was_not_the_cause(site):
    site.kill("health check", "question")
    site.send("health check")
    site.succeed()
    site.kill("health check", "question")
    assert site.states() == {"question": "suspect"}


def test_a_suspect_is_tried_alone_one_at_a_time_and_one_success_clears_it(site):
    for _ in range(2):
        site.kill("health check", "question")
    assert set(site.states().values()) == {"suspect"}
    site.send("another", "b")
    assert site.send("health check", "b") == RETRY_S, "the engine serves another"
    assert site.send("health check", "a") == "served"
    assert site.suspects.trial == "a"
    assert site.send("question", "b") == RETRY_S, "one trial at a time"
    site.succeed()
    assert site.suspects.trial is None
    assert site.states() == {"question": "suspect"}
    assert site.send("health check", "b") == "served"


def test_what_kills_an_engine_alone_is_refused_until_it_is_forgotten_or_cleared(site):
    for _ in range(3):
        site.kill(POISON)
    assert site.states() == {POISON: "refused"}
    site.now += LIFETIME_S - 1
    assert site.send(POISON) is None
    site.now += 1
    assert site.states() == {}
    for _ in range(3):
        site.kill(POISON)
    site.suspects.clear(POISON)
    assert site.send(POISON) == "served"


def test_a_trial_that_others_joined_proves_nothing_and_the_suspect_waits(site):
    for _ in range(2):
        site.kill("health check")
    site.kill("health check", "question")
    assert site.states() == {"health check": "held"}
    assert site.send("health check", "b") == LIFETIME_S
    assert site.send("question") == "served"


def test_a_suspect_of_two_deaths_that_are_long_apart_is_none(site):
    site.kill("health check")
    site.now += LIFETIME_S
    assert not site.suspects.has(make_message("r", 5, 3))
    site.kill("health check")
    assert site.states() == {}


def test_the_oldest_are_forgotten_when_there_are_too_many(site):
    for number in range(10_001):
        site.kill(f"{number}")
    for mark in ("10000", "0"):
        site.kill(mark)
    assert site.states() == {"10000": "suspect"}


_STEPS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from((POISON, *INNOCENT)), st.sampled_from(ENGINES)),
    st.tuples(st.sampled_from(("succeed", "die")), st.sampled_from(ENGINES)),
    st.tuples(st.just("pass"), st.sampled_from((1.0, LIFETIME_S / 5))),
)


@given(st.lists(_STEPS, min_size=60, max_size=120))
def test_no_innocent_request_is_refused_and_a_poison_kills_three_engines_at_most(steps):
    site = Site()
    for name, *arguments in steps:
        if name == "pass":
            site.now += arguments[0]
        elif name == "die":
            # The one coincidence that nothing can tell from a cause.
            if site.suspects.trial != arguments[0] or not site.suspects.is_alone:
                site.die(*arguments)
        elif name == "succeed":
            site.succeed(*arguments)
        elif site.send(*arguments) == "served" and arguments[0] == POISON:
            site.killed_at.append(site.now)
            site.die(arguments[1])
    assert set(site.refused) <= {POISON}
    for killed_at in site.killed_at:
        assert sum(killed_at - LIFETIME_S < it <= killed_at for it in site.killed_at) <= 3
