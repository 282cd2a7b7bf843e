"""Limits of what keys may use together with the keys that came of them."""

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.errors import Forbidden
from server.accounts.auth import SCOPES
from server.accounts.lineage import MAX_CHAIN
from server.limits.amounts import LIMITS
from server.limits.memory import MemoryLimiter
from server.limits.rules import RateLimited
from tests.server.key_world import World, id_of

_names = itertools.count()


class Users(World):
    """A world whose keys send requests, all of which stay under way."""

    def __init__(self, database):
        super().__init__(database, f"t{next(_names)}")
        self.passed_ms = 0
        self.limiter = MemoryLimiter(lambda: self.passed_ms)
        self.numbers = itertools.count()

    def ask(self, plaintext, tokens=1):
        """Whether a request with a key passes."""
        limits = self.identity(plaintext).limits
        assert len({(limit.metric, limit.scope_id) for limit in limits}) == len(limits)
        name = f"r{next(self.numbers)}"
        try:
            asyncio.run(self.limiter.acquire(name, limits, tokens=tokens, lifetime_ms=10_000_000))
        except RateLimited:
            return False
        return True


@pytest.fixture
def users(sqlite_database):
    return Users(sqlite_database)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_key_and_all_that_came_of_it_use_one_limit_together(users, limit):
    root = users.make(scopes=SCOPES, **{limit: 10})
    child = users.make(by=root, scopes=SCOPES)
    grandchild = users.make(by=child, scopes=SCOPES, **{limit: 4})
    rotated = users.rotate(child)
    some = itertools.cycle([root, child, grandchild, rotated, users.make(by=rotated)])
    assert sum(users.ask(next(some)) for _ in range(50)) == 10


def test_a_refused_request_of_a_child_charges_none_of_the_keys_above_it(users):
    root = users.make(scopes=SCOPES, requests_per_minute=5)
    child = users.make(by=root, requests_per_minute=1)
    assert [users.ask(child) for _ in range(3)] == [True, False, False]
    standings = asyncio.run(users.limiter.standings(users.identity(root).limits))
    assert [standing.remaining for standing in standings] == [4]


def test_a_rotated_key_goes_on_with_what_the_key_before_it_has_left(users):
    old = users.make(requests_per_minute=10)
    assert all(users.ask(old) for _ in range(6))
    new = users.rotate(old)
    newest = users.rotate(new)
    assert [users.ask(key) for key in (newest, new, old, newest, old)] == [True] * 4 + [False]


def test_a_changed_limit_binds_the_rotated_key_in_its_overlap_too(users):
    old = users.make(requests_per_minute=10)
    new = users.rotate(old)
    users.change(new, requests_per_minute=2)
    assert users.key(old).requests_per_minute == 2
    assert [users.ask(old) for _ in range(3)] == [True, True, False]


def test_what_a_key_makes_in_its_overlap_belongs_to_the_key_that_replaced_it(users):
    old = users.make(scopes=SCOPES)
    new = users.rotate(users.rotate(old))
    child = users.make(by=old)
    assert users.key(child).created_by == id_of(new)


def test_a_request_charges_no_more_limits_than_a_chain_has_keys(users):
    amounts = dict.fromkeys(LIMITS, 9)
    key = users.make(scopes=SCOPES, **amounts)
    for _ in range(MAX_CHAIN - 1):
        key = users.make(by=users.rotate(key), scopes=SCOPES)
    with pytest.raises(Forbidden):
        users.make(by=key)
    assert len(users.identity(key).limits) == MAX_CHAIN * len(LIMITS)


_AMOUNTS = {"requests_per_minute": 1, "tokens_per_minute": 10, "max_concurrency": 2}
_acts = st.lists(
    st.tuples(
        st.sampled_from(["make", "rotate", "ask", "ask", "ask", "wait"]),
        st.integers(0, 30),
        st.integers(1, 5),
    ),
    max_size=40,
)


@given(amount=st.integers(1, 6), acts=_acts)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_key_and_all_that_came_of_it_get_more_than_its_limit(sqlite_database, amount, acts):
    """The test keeps its own tree: `above` has the parent of each key's row of rotations."""
    users = Users(sqlite_database)
    limits = {name: amount * unit for name, unit in _AMOUNTS.items()}
    keys = [(users.make(scopes=SCOPES, **limits), 0)]
    above, amounts, passed, tokens = [None], [amount], Counter(), Counter()
    for act, which, number in acts:
        key, node = keys[which % len(keys)]
        if act == "wait":
            users.passed_ms += number * 7000
        elif act == "rotate":
            keys.append((users.rotate(key), node))
        elif act == "make":
            amount = min(number, amounts[node])
            limits = {name: amount * unit for name, unit in _AMOUNTS.items()}
            try:
                keys.append((users.make(by=key, scopes=SCOPES, **limits), len(above)))
            except Forbidden:  # the chain is too long
                continue
            above.append(node)
            amounts.append(amount)
        elif users.ask(key, tokens=2 * number):
            while node is not None:
                passed[node] += 1
                tokens[node] += 2 * number
                node = above[node]
    minutes = 1 + users.passed_ms / 60_000
    for node, amount in enumerate(amounts):
        assert passed[node] <= min(amount * minutes, 2 * amount), "all requests are under way"
        assert tokens[node] <= 10 * amount * minutes
