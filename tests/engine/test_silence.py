"""A peer is judged by its silence while the listener was awake."""

from hypothesis import given
from hypothesis import strategies as st

from engine.silence import Silence
from tests.engine.fakes import FakeClock

gaps = st.integers(0, 3600 * 64).map(lambda ticks: ticks / 64)  # sums without rounding


def listen(silence, clock, gap_s):
    clock.now += gap_s
    return silence.is_too_long()


@given(st.lists(st.tuples(gaps, st.booleans()), max_size=30))
def test_silence_is_never_more_than_what_was_observed_since_the_last_sign(events):
    clock = FakeClock()
    silence = Silence(10.0, 1.0, clock)
    observed_s = 0.0
    for gap_s, is_heard in events:
        is_too_long = listen(silence, clock, gap_s)
        observed_s += min(gap_s, 1.0)
        assert silence.seconds == observed_s
        assert is_too_long == (silence.seconds > 10.0)
        if is_heard:
            silence.end()
            observed_s = 0.0


def test_a_listener_that_stood_still_forgives():
    clock = FakeClock()
    silence = Silence(10.0, 1.0, clock)
    assert not any(listen(silence, clock, 3600.0) for _ in range(10))
    assert listen(silence, clock, 0.1)


def test_a_clock_that_was_set_back_counts_nothing():
    clock = FakeClock()
    silence = Silence(10.0, 1.0, clock)
    assert not listen(silence, clock, -100.0)
    assert silence.seconds == 0.0
