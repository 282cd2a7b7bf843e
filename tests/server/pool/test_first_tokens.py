"""Waits for first tokens, which the autoscaler uses."""

from server.pool.first_tokens import WINDOW_S, FirstTokens


def test_a_percentile_is_of_the_last_half_minute():
    now = 0.0
    waits = FirstTokens(lambda: now)
    assert waits.percentile_s(0.9) is None
    waits.note(99.0)
    now = WINDOW_S + 1
    for wait_s in range(1, 11):
        waits.note(float(wait_s))
    assert [waits.percentile_s(share) for share in (0.9, 1.0, 0.01)] == [9, 10, 1]
    now *= 3
    assert waits.percentile_s(0.9) is None
