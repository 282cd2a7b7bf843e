"""Failures of an adapter: which a new fetch may mend, and when it is tried again."""

import pytest

from lora.entry import Entry
from lora.errors import Failure
from lora.eviction import Claim
from tests.engine.fakes import make_adapter


@pytest.fixture
def entry():
    return Entry(make_adapter(), Claim("t"))


def test_a_failed_adapter_is_tried_again_less_and_less_often_however_long_it_fails(entry):
    waits = []
    for now in range(1100):
        entry.fail(Failure("unavailable", "503"), now)
        waits.append(entry.retry_after_s(now))
        entry.state = "failed"
        assert [entry.is_due(now + waits[-1] + late) for late in (-0.1, 0)] == [False, True]
    assert waits[:7] == [1, 2, 4, 8, 16, 30, 30]
    assert set(waits[7:]) == {30}
    entry.fail(Failure("incompatible", "of another base"), 0)
    assert not entry.is_due(1e9), "it never fits"


@pytest.mark.parametrize(("kind", "times"), [("lost", 1), ("evicted", 8), ("unavailable", 0)])
def test_what_is_lost_again_and_again_fails_in_the_end(entry, kind, times):
    failure = Failure(kind, "gone")
    assert [entry.lose(failure) for _ in range(times + 1)] == [True] * times + [False]
    entry.fail(failure, 0)
    assert entry.lose(failure) == bool(times), "counted anew"
