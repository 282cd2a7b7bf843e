"""Stop strings: text leaves only if no stop can include it, and ends right before the stop."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis.strategies import binary, booleans, lists, sampled_from

from engine.requests.stops import StopMatcher

few_bytes = sampled_from([0x61, 0x62, 0xC3, 0xA9])
any_pieces = lists(lists(few_bytes, max_size=4).map(bytes), max_size=20) | lists(binary(max_size=3))
any_stops = lists(lists(few_bytes, min_size=1, max_size=5).map(bytes), min_size=1, max_size=4)


@pytest.mark.parametrize("order", [1, -1])
def test_each_of_many_is_found_in_whatever_order_they_are_given(order):
    stops = [bytes(letters) for letters in product(b"abc", repeat=3)][::order]
    for stop in stops:
        matcher = StopMatcher(stops)
        assert matcher.push(1, b"-" + stop[:2]) == ([], None)
        assert matcher.push(2, stop[2:]) == ([1, 2], 3)
        assert matcher.may_end(stop[2:] + b"-")


def test_a_false_start_is_released():
    matcher = StopMatcher([b"END"])
    assert matcher.push(1, b"E") == ([], None)
    assert matcher.push(2, b"x") == ([1, 2], None)


def first_complete(text, stops):
    """Start and end of the stop that is complete first when reading bytewise; None without one."""
    for end in range(len(text) + 1):
        begun = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begun:
            return min(begun), end
    return None


@given(any_pieces, any_stops, booleans())
@settings(max_examples=300, deadline=None)
def test_the_text_ends_before_or_with_the_stop_that_is_complete_first_however_it_is_cut(
    tokens, stops, is_text
):
    matcher, released, surplus = StopMatcher(stops, None, is_text), [], None
    text, found = b"", first_complete(b"".join(tokens), stops)
    start, end = found or (None, None)
    for token_id, piece in enumerate(tokens):
        text += piece
        out, surplus = matcher.push(token_id, piece)
        released += out
        if surplus is not None:
            break
        sent = b"".join(tokens[i] for i in released)
        assert start is None or len(sent) <= start, "a token of the stop string has left"
    released += matcher.flush()
    assert released == list(range(len(released))), "tokens leave in order"
    assert text == b"".join(tokens[i] for i in released)
    assert (surplus is None) == (start is None)
    assert (
        surplus is None
        or text[: len(text) - surplus] == b"".join(tokens)[: end if is_text else start]
    )


@given(lists(sampled_from(b"ab"), max_size=5).map(bytes), any_stops)
@settings(max_examples=200, deadline=None)
def test_a_text_that_cannot_end_a_stop_string_does_not_whatever_stands_before_it(text, stops):
    """The text before is what tokens that have left and one that nobody knows yet say."""
    may_end = StopMatcher(stops).may_end(text)
    befores = [bytes(b) for size in range(5) for b in product(b"ab", repeat=size)]
    completed = [
        before
        for before in befores
        if first_complete(before, stops) is None
        and first_complete(before + text, stops) is not None
    ]
    assert bool(completed) <= may_end
    if len(stops) == 1 and set(stops[0]) <= set(b"ab"):
        assert bool(completed) == may_end
