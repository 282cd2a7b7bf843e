"""Drafts from text: what followed the longest match, and nothing of another text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.ngrams import NO_DRAFT, NgramIndex
from engine.drafts.pools import DraftPools
from engine.drafts.text import TextDrafter
from tests.engine.fakes import make_message, make_scheduler

TEXT = st.lists(st.integers(0, 4), max_size=60)


def index_of(*texts):
    index = NgramIndex()
    for text in texts[:-1]:
        index.add_text(text)
    index.extend(texts[-1])
    return index


def test_the_text_behind_the_same_words_is_drafted():
    index = index_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert index.continuation(2).token_ids == (4, 5)
    assert index.continuation(2).match == 3
    assert index.continuation(0).token_ids == ()


def test_the_longest_match_is_taken_not_the_last():
    text = [7, 8, 1, 2, 3, 40, 9, 1, 2, 3, 50, 7, 8, 1, 2, 3]
    assert index_of(text).continuation(1).token_ids == (40,)
    assert index_of(text).continuation(1).match == 5


def test_a_text_that_repeats_itself_goes_on():
    assert index_of([5, 1, 2, 1, 2, 1, 2]).continuation(5).token_ids == (1, 2, 1, 2, 1)


def test_a_draft_ends_where_a_text_ends():
    index = index_of([1, 2, 3, 4], [6, 6, 1, 2, 3])
    assert index.continuation(7).token_ids == (4,)
    assert index_of([1, 2, 3], [6, 1, 2, 3]).continuation(7).token_ids == ()


def test_nothing_is_drafted_where_nothing_is_known():
    assert index_of([]).continuation(7) == NO_DRAFT
    assert index_of([1, 2, 3]).continuation(7) == NO_DRAFT
    assert NgramIndex().find([1, 2, 3], 7) == NO_DRAFT


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 8))
def test_a_draft_follows_its_match_in_one_of_the_texts(texts, most):
    draft = index_of(*texts).continuation(most)
    assert len(draft.token_ids) <= most
    last = texts[-1]
    assert (draft.match == 0) == (
        not last or not any(last[-1] in t for t in [*texts[:-1], last[:-1]])
    )
    if not draft.match:
        return
    match = last[-draft.match :]
    unrolled = [*texts[:-1], [*last, *draft.token_ids]]
    wanted = [*match, *draft.token_ids]
    places = [(t, i) for t in unrolled for i in range(len(t) - len(wanted) + 1)]
    found = [t for t, i in places if t[i : i + len(wanted)] == wanted]
    assert len(found) >= 1 + bool(draft.token_ids)


@given(TEXT, TEXT)
def test_adding_tokens_in_parts_is_adding_them_at_once(first, second):
    parts = NgramIndex()
    parts.extend(first)
    parts.extend(second)
    assert parts == index_of([*first, *second])


@pytest.mark.parametrize(("num_between", "expected"), [(0, (5,)), (8100, (5,)), (9000, ())])
def test_of_a_long_prompt_the_last_tokens_are_looked_at(num_between, expected):
    scheduler = make_scheduler(num_slabs=700, max_model_len=10_000)
    prompt = [7, 8, 9, 5, *range(100, 100 + num_between), 7, 8, 9]
    scheduler.add("gw", make_message(prompt=prompt))
    [request] = scheduler.queues.waiting
    assert TextDrafter(DraftPools(0)).drafts([request], 1)[request].token_ids == expected
