"""A peer is judged by its silence while the listener was awake."""

from hypothesis import given
from hypothesis import strategies as st

from engine.wire.silence import Silence
from tests.engine.fakes import FakeClock

gaps = st.integers(-3600 * 64, 3600 * 64).map(lambda ticks: ticks / 64)  # sums without rounding


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
        observed_s += min(max(gap_s, 0.0), 1.0)
        assert silence.seconds == observed_s
        assert is_too_long == (silence.seconds > 10.0)
        if is_heard:
            silence.end()
            observed_s = 0.0
