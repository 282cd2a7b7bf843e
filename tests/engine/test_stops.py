"""Stop strings: what leaves is certain, and the text ends exactly before the stop."""

from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from

from engine.stops import StopMatcher

pieces = lists(sampled_from([b"a", b"b", b"ab", b"ba", b"", b"aab", b"c"]), max_size=20)
abc_stops = lists(sampled_from([b"ab", b"aba", b"bb", b"cab", b"aaa", b"c"]), max_size=3)


def test_a_stop_string_across_tokens_is_found():
    matcher = StopMatcher([b"END"])
    assert matcher.push(1, b"x E") == ([], None)
    assert matcher.push(2, b"N") == ([], None)
    assert matcher.push(3, b"D!") == ([1, 2, 3], 4)


def test_a_false_start_is_released():
    matcher = StopMatcher([b"END"])
    assert matcher.push(1, b"E") == ([], None)
    assert matcher.push(2, b"x") == ([1, 2], None)


def test_the_earliest_stop_wins():
    matcher = StopMatcher([b"cd", b"b"])
    assert matcher.push(1, b"abcd") == ([1], 3)


@given(pieces, abc_stops)
@settings(max_examples=500, deadline=None)
def test_released_text_never_contains_or_begins_a_stop_that_comes(tokens, stops):
    matcher = StopMatcher(stops)
    released: list[int] = []
    for token_id, piece in enumerate(tokens):
        out, surplus = matcher.push(token_id, piece)
        released += out
        text = b"".join(tokens[: token_id + 1])
        ends = [text.find(stop) for stop in stops if stop in text]
        if surplus is not None:
            assert released == list(range(token_id + 1))
            assert len(text) - surplus == min(ends)
            return
        assert not ends
        sent = b"".join(tokens[i] for i in released)
        assert released == list(range(len(released)))
        for stop in stops:  # whatever may come, no stop begins inside what was sent
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    assert len(sent) <= len(text) - length
    assert released + matcher.flush() == list(range(len(tokens)))
