"""A child that stands still is noticed, and one that announced long work is waited for."""

import os

import pytest

from lora.beat import Beat
from server.launch.watchdog import Watchdog
from tests.engine.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def watchdog(clock):
    watchdog = Watchdog(first_beat_s=300.0, clock=clock)
    yield watchdog
    watchdog.close()


def wait(watchdog, clock, seconds):
    """Look ten times a second; return the seconds until the child was found silent, or None."""
    for turn in range(1, int(10 * seconds) + 1):
        clock.now += 0.1
        if watchdog.is_silent():
            return turn / 10
    return None


def test_a_child_that_never_beats_has_its_start_to_do_so(watchdog, clock):
    assert wait(watchdog, clock, 310) == pytest.approx(300, abs=0.3)
    assert watchdog.complaint == "has been silent for 300 s while starting"


def test_a_child_that_stops_beating_is_silent_after_its_limit(watchdog, clock):
    Beat(watchdog.descriptor, 10.0, clock).beat()
    assert wait(watchdog, clock, 20) == pytest.approx(10, abs=0.3)
    assert watchdog.complaint == "has been silent for 10 s"


def test_a_child_that_beats_is_never_silent(watchdog, clock):
    beat = Beat(watchdog.descriptor, 10.0, clock)
    for _ in range(50):
        beat.beat()
        assert wait(watchdog, clock, 1) is None


def test_announced_work_is_waited_for_as_long_as_was_said_and_no_longer(watchdog, clock):
    beat = Beat(watchdog.descriptor, 10.0, clock)
    with beat.busy("loading the model", 100.0):
        assert wait(watchdog, clock, 99) is None
    assert wait(watchdog, clock, 20) == pytest.approx(10, abs=0.3)
    with beat.busy("capturing graphs", 100.0):
        assert wait(watchdog, clock, 200) == pytest.approx(100, abs=0.3)
        assert watchdog.complaint == "has been silent for 100 s while capturing graphs"


def test_a_watchdog_that_stood_still_forgives(watchdog, clock):
    Beat(watchdog.descriptor, 10.0, clock).beat()
    assert not watchdog.is_silent()
    for _ in range(9):
        clock.now += 3600.0
        assert not watchdog.is_silent()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="elsewhere it is a file without a name")
def test_beats_are_on_no_disk(watchdog):
    assert os.readlink(f"/proc/self/fd/{watchdog.descriptor}").startswith("/memfd:")
