"""Expected times of adapter loads, by the figures of engines."""

import pytest

from engine.wire.messages import TierStats
from server.pool.load_costs import LoadCosts
from tests.server.api.test_metrics import make_stats


def stats(**loads):
    """An engine's figures. loads: tier=(bytes, seconds) since its start."""
    tiers = tuple(
        TierStats(tier=tier, load_bytes=size, load_seconds=seconds)
        for tier, (size, seconds) in loads.items()
    )
    return make_stats(tiers=tiers)


def test_the_farther_away_the_longer_it_takes():
    costs = LoadCosts()
    tiers = ("device", "host", "disk", "remote")
    found = [costs.load_s(tier, 1 << 20) for tier in tiers]
    assert found == sorted(found)
    assert (found[0], costs.load_s("fetching", 1)) == (0.0, costs.load_s("remote", 1))


def test_what_engines_saw_is_believed_all_of_them_together():
    costs = LoadCosts()
    costs.note(None, stats(device=(1000, 2.0), host=(1000, 0.0), disk=(1000, 0.0)))
    assert costs.load_s("host", 100) == pytest.approx(0.2)
    costs.note(None, stats(device=(1000, 4.0)))  # figures of another engine
    assert costs.load_s("host", 100) == pytest.approx(0.3, rel=0.02)


def test_what_was_is_forgotten_and_nothing_new_changes_nothing():
    costs, before = LoadCosts(), None
    seen = stats(device=(1000, 1000.0))
    costs.note(before, seen)
    for _ in range(100):
        costs.note(seen, seen)
    assert costs.load_s("host", 1) == pytest.approx(1.0)
    for number in range(1, 1000):
        before, seen = seen, stats(device=(1000 + 1000 * number, 1000.0 + number))
        costs.note(before, seen)
    assert costs.load_s("host", 1) == pytest.approx(0.001, rel=0.01)


def test_an_engine_that_was_started_again_counts_from_nothing():
    costs = LoadCosts()
    first, again = stats(device=(5000, 5.0)), stats(device=(100, 0.1))
    costs.note(None, first)
    costs.note(first, again)
    assert costs.load_s("host", 1000) == pytest.approx(1.0)
