"""Tokens by tenant: few have a name at a time, no token is lost, and counts do not fall."""

from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from server.inference.tenant_tokens import OTHER, TenantTokens
from tests.server.factories import Clock

HOUR_S = 3600.0


def test_the_first_tenants_have_names_and_the_rest_is_other() -> None:
    tokens = TenantTokens(2, Clock())
    for tenant_id in ("a", "b", "c", "a", "d"):
        tokens.note(tenant_id, 5, 1)
    assert tokens.counts == {OTHER: (10, 2), "a": (10, 2), "b": (5, 1)}


def test_the_busiest_of_an_hour_take_the_places_of_those_that_were_not() -> None:
    clock = Clock()
    tokens = TenantTokens(2, clock)
    for tenant_id, prompt in (("a", 5), ("b", 1), ("c", 9)):
        tokens.note(tenant_id, prompt, 0)
    clock.now = HOUR_S
    tokens.note("c", 2, 0)
    assert tokens.counts == {OTHER: (9, 0), "a": (5, 0), "c": (2, 0)}


def test_a_quiet_hour_takes_no_name_away() -> None:
    clock = Clock()
    tokens = TenantTokens(2, clock)
    tokens.note("a", 5, 0)
    for _ in range(3):
        clock.now += HOUR_S
        tokens.note("b", 1, 0)
    assert tokens.counts == {OTHER: (0, 0), "a": (5, 0), "b": (3, 0)}


@given(lists(tuples(sampled_from("abcdefgh"), integers(0, 9), sampled_from((0, 900, 4000)))))
def test_names_are_bounded_and_no_token_is_lost(noted: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    tokens, before, total = TenantTokens(3, clock), {OTHER: (0, 0)}, 0
    for tenant_id, prompt, seconds in noted:
        clock.now += seconds
        tokens.note(tenant_id, prompt, 1)
        after = tokens.counts
        assert len(after) <= 4
        # A name that is new begins at 0.
        rises = {name: after[name][0] - before.get(name, (0, 0))[0] for name in after}
        assert all(rise >= 0 for rise in rises.values())
        total += sum(rises.values())
        before = after
    assert total == sum(prompt for _, prompt, _ in noted)
