"""How many requests are refused since engines died of them."""

import pytest

from server.pool.quarantine import Quarantine, Quarantined


def test_a_request_counts_as_refused_from_its_second_death_on():
    quarantine = Quarantine()
    for mark in ("once", "twice", "thrice", "twice", "thrice", "thrice"):
        quarantine.note_death(mark)
    assert quarantine.num_refused == 2
    quarantine.check("once")
    with pytest.raises(Quarantined):
        quarantine.check("twice")
