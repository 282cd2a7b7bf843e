"""How long a step may take before its engine counts as hung."""

import time

import pytest

from engine.steps.times import MOST_S, PhaseSeconds, StepTimes
from tests.engine.fakes import FakeClock, make_core, make_message, make_scheduler, run_until_idle

DECODE, PREFILL = (1, False), (8, False)


def test_the_first_two_steps_of_a_size_may_take_as_long_as_any():
    times = StepTimes()
    for seconds in (60.0, 0.5):
        assert times.limit_s([DECODE]) == MOST_S
        times.note([DECODE], seconds)
    assert times.limit_s([DECODE]) == 10.0, "the first one compiled, and tells nothing"
    assert times.limit_s([DECODE, PREFILL]) == MOST_S


def test_a_slow_size_is_not_forgotten_during_many_quick_steps_of_another():
    times = StepTimes()
    for _ in range(2):
        times.note([PREFILL], 5.0)
    for _ in range(1000):
        times.note([DECODE], 0.1)
    assert (times.limit_s([PREFILL]), times.limit_s([DECODE])) == (100.0, 2.0)


def test_one_slow_step_is_forgotten_by_and_by():
    times = StepTimes()
    for seconds in (1.0, 20.0, *[0.1] * 60):
        times.note([DECODE], seconds)
    assert times.limit_s([DECODE]) == pytest.approx(2.0)


def test_no_step_may_take_longer_than_the_first():
    times = StepTimes()
    for _ in range(2):
        times.note([PREFILL], 60.0)
    assert times.limit_s([PREFILL]) == MOST_S


def test_a_turn_without_a_step_may_take_no_longer_than_any_other():
    assert StepTimes().limit_s(()) == 0.0


def test_the_phases_of_steps_add_up_to_their_time():
    clock = FakeClock()
    phases = PhaseSeconds(clock)
    for _ in range(2):
        clock.now += 100.0  # between the steps
        phases.begin()
        for phase, seconds in (("schedule", 0.25), ("compute", 2.0)):
            clock.now += seconds
            phases.end(phase)
    assert phases.seconds == (("schedule", 0.5), ("compute", 4.0))


def test_an_engines_figures_have_the_seconds_of_its_steps(tmp_path):
    core = make_core(tmp_path, make_scheduler(clock=time.monotonic))
    core.handle("gw", make_message())
    run_until_idle(core)
    seconds = dict(core.take_stats().step_seconds)
    assert list(seconds) == ["schedule", "compute", "update", "journal", "deliver"]
    assert all(value > 0 for value in seconds.values())
