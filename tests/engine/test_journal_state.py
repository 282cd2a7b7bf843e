"""The fold of a journal's records: what is open, what each end says, and what is to post."""

import pytest

from engine.journal.lines import JournalCorrupt
from engine.journal.state import Ending, JournalState, output_sha256
from engine.wire.messages import Timings
from engine.wire.records import ProgressRecord, RequestProgress, ResidencyRecord, StartRecord


def start(seq, request_id="r1"):
    return StartRecord(
        seq=seq, at=seq, request_id=request_id, tenant_id="acme", adapter_digest="d",
        num_prompt_tokens=9, token_lease=9,
    )  # fmt: skip


def progress(seq, *requests):
    return ProgressRecord(seq=seq, at=seq, step=1, requests=requests)


def fold(*records):
    state = JournalState("base-1")
    state.apply([state.now.checkpoint(0.0), *records])
    return state


def end(state, request_id="r1", timings=None):
    ends = state.ends([Ending(request_id, "length", "max_tokens", timings)], at=99.0)
    state.apply(ends)
    return ends[0]


def test_an_end_has_all_answers_one_after_the_other_up_to_the_last_token():
    state = fold(
        start(1),
        progress(2, RequestProgress("r1", 6, (), 1, 4)),
        progress(3, RequestProgress("r1", 9, (7,), 1, 4)),
        progress(4, RequestProgress("r1", 9, (5, 6), 0, 4), RequestProgress("r1", 9, (8,), 1, 4)),
    )
    record = end(state)
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (9, 4)
    assert (record.num_completion_tokens, record.output_sha256) == (4, output_sha256([5, 6, 7, 8]))
    assert (record.started_at, record.first_token_at, record.at) == (1, 3, 99.0)
    assert (state.open, list(state.unsettled)) == ({}, [record])


def test_an_end_says_what_its_request_waited_for():
    for timings, said in (
        (None, (None, None, None)),
        (Timings(load_s=1 / 3, load_tier="store", queue_s=0.0), (0.333333, "store", 0.0)),
        (Timings(load_s=None, load_tier=None, queue_s=2 / 3), (None, None, 0.666667)),
    ):
        record = end(fold(start(1)), timings=timings)
        assert (record.load_s, record.load_tier, record.queue_s) == said


def test_what_is_settled_is_needed_as_long_as_a_request_that_began_before_it_is_open():
    state = fold(start(1, "short"), start(2, "long"), start(3))
    end(state, "short")
    settled = end(state).seq
    assert (state.forget_settled(settled), list(state.unsettled)) == (1, [])
    last = end(state, "long")
    assert (state.forget_settled(settled), list(state.unsettled)) == (settled, [last])


def test_residency_is_to_post_and_a_request_whose_start_was_deleted_is_not_open():
    residency = ResidencyRecord(seq=2, at=2.0, started_at=1.0, items=())
    state = fold(progress(1, RequestProgress("gone", 9, (7,))), residency)
    assert (state.open, list(state.unsettled)) == ({}, [residency])


def test_a_damaged_segment_lacks_the_ends_whose_numbers_are_skipped():
    whole = fold(*(start(seq, f"r{seq}") for seq in range(1, 6)))
    first, *_, last = [end(whole, name) for name in list(whole.open)]
    for readable, num_lost in (([first, last], 3), ([last], 4), ([], 0)):
        state = fold(*(start(seq, f"r{seq}") for seq in range(1, 6)))
        assert state.pass_over(readable, 100, is_new=True) == num_lost


def test_a_gap_is_over_with_the_next_checkpoint_and_no_number_is_given_twice():
    state = fold(start(1))
    assert state.pass_over([start(2, "r2")], 100, is_new=True) == 0
    assert list(state.open) == ["r1", "r2"]
    assert [record.seq for record in state.ends([Ending("r1", "error", "deadline")], 0.0)] == [102]
    with pytest.raises(JournalCorrupt, match="no checkpoint"):
        state.apply([start(102, "r3")])
    state.apply([state.now._replace(seq=50).checkpoint(0.0), start(51, "r3")])
    assert state.now.seq == 51
