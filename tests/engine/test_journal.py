"""The journal holds every token that left exactly once, whenever the engine died."""

import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from engine.journal.files import JournalGone
from engine.journal.journal import Journal
from engine.journal.lines import SegmentDamaged, read_records
from engine.journal.state import output_sha256
from engine.wire.messages import ReadJournal
from tests.engine.fakes import (
    make_core,
    make_message,
    run_until_idle,
    tokens_of,
)


def reopen(directory, **options):
    return Journal(directory / "journal", "eng-1", "base-1", **options)


def segments(directory):
    return sorted((directory / "journal").glob("*.journal"))


def test_an_end_record_says_all_that_a_bill_needs(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", make_message(prompt_len=9, max_tokens=5, tenant_id="acme"))
    outputs = run_until_idle(core)["r1"]
    (record,) = core.journal.read(0, 10).records
    assert (record.tenant_id, record.request_id) == ("acme", "r1")
    assert (record.num_prompt_tokens, record.num_completion_tokens) == (9, 5)
    assert (record.finish_reason, record.stop_cause) == ("length", "max_tokens")
    assert record.output_sha256 == output_sha256(tokens_of(outputs))
    assert record.started_at <= record.first_token_at <= record.at


@pytest.mark.parametrize("is_made_again", [False, True])
def test_an_end_does_not_leave_for_a_file_that_was_deleted(tmp_path, is_made_again):
    core = make_core(tmp_path)
    core.handle("gw", make_message(max_tokens=3))
    core.step()
    (segment,) = segments(tmp_path)
    shutil.rmtree(tmp_path / "journal")
    if is_made_again:
        segment.parent.mkdir()
        segment.touch()
    with pytest.raises(JournalGone, match="Put it back"):
        run_until_idle(core)


@given(integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_a_write_cut_anywhere_loses_only_what_was_not_whole(tmp_path_factory, cut):
    directory = tmp_path_factory.mktemp("engine")
    core = make_core(directory)
    for name in ("r1", "r2"):
        core.handle("gw", make_message(name, max_tokens=6))
    run_until_idle(core)
    (path,) = segments(directory)
    os.truncate(path, max(0, path.stat().st_size - cut))
    recovered = reopen(directory)
    first = recovered.read(0, 10).records
    assert all(record.num_completion_tokens <= 6 for record in first)
    assert len({record.request_id for record in first}) == len(first)
    assert reopen(directory).read(0, 10).records == first, "recovering twice changes nothing"


@given(place=integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_a_damaged_segment_is_set_aside_and_only_its_damaged_line_is_lost(tmp_path_factory, place):
    directory = tmp_path_factory.mktemp("engine")
    core = make_core(directory)
    core.journal.files.segment_bytes = 600
    for i in range(4):
        core.handle("gw", make_message(f"r{i}", max_tokens=9))
        run_until_idle(core)
    whole = core.journal.read(0, 9).records
    paths = segments(directory)
    path = paths[place % len(paths)]
    data = bytearray(path.read_bytes())
    data[place % (len(data) - 1)] ^= 1  # a change of the last byte looks like an unfinished write
    path.write_bytes(data)
    with pytest.raises(SegmentDamaged):
        reopen(directory, damaged="stop")
    for damaged in ("set_aside", "set_aside", "stop"):
        journal = reopen(directory, damaged=damaged)
        kept = journal.read(0, 9).records
        assert journal.last_seq >= core.journal.last_seq, "no number is given twice"
        assert list(read_records(directory / "journal"))[-1].seq == journal.last_seq
    journal.read(journal.last_seq, 9)
    assert reopen(directory).last_seq == journal.last_seq, "nothing is ended a second time"
    assert path.with_suffix(".damaged").read_bytes() == data
    assert len(set(whole) - set(kept)) <= 1
    # The request of a lost end was open by all that is left, and is ended for free.
    assert {end.stop_cause for end in set(kept) - set(whole)} <= {"engine_failure"}


def test_an_end_outlives_the_deleted_segment_that_its_request_began_in(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", make_message(max_tokens=50))
    for _ in range(4):
        core.step()
    crashed = reopen(tmp_path)  # ends the request, in a new segment
    assert crashed.read(crashed.last_seq, 10).records == ()
    assert len(segments(tmp_path)) == 1
    again = reopen(tmp_path)
    assert (again.last_seq, again.read(crashed.last_seq, 10).records) == (crashed.last_seq, ())


def test_totals_go_on_when_all_ends_are_settled_and_deleted(tmp_path):
    core = make_core(tmp_path)
    core.journal.files.segment_bytes = 600
    for i in range(4):
        core.handle("gw", make_message(f"r{i}", prompt_len=7, max_tokens=3))
        run_until_idle(core)
    last = core.journal.read(0, 10).records[-1]
    assert (last.number, last.total_prompt_tokens, last.total_completion_tokens) == (4, 28, 12)
    core.handle("gw", make_message("killed", prompt_len=1, max_tokens=99))
    for _ in range(9):
        core.step()
    core.journal.read(last.seq, 10)
    assert all(b'"end"' not in path.read_bytes() for path in segments(tmp_path))
    (end,) = reopen(tmp_path).read(last.seq, 10).records
    assert (end.number, end.total_prompt_tokens, end.total_completion_tokens) == (5, 29, 21)


def test_reading_is_paged_and_says_when_it_is_complete(tmp_path):
    core = make_core(tmp_path)
    for i in range(5):
        core.handle("gw", make_message(f"r{i}"))
    run_until_idle(core)
    page = core.journal.read(0, 3)
    assert (len(page.records), page.complete) == (3, False)
    page = core.journal.read(page.records[-1].seq, 3)
    assert (len(page.records), page.complete) == (2, True)


def test_while_the_settler_is_away_streams_end_normally_and_then_everything_settles(tmp_path):
    core = make_core(tmp_path, max_num_seqs=2)
    core.max_unsettled = 3
    for i in range(6):
        core.handle("gw", make_message(f"r{i}"))
    outputs = run_until_idle(core)
    assert [each[-1].finish_reason for each in outputs.values()] == ["length"] * 6
    ((_, refused),) = core.handle("gw", make_message("new"))
    assert refused.outputs[0].error == "metering_unavailable"
    first = core.journal.read(0, 4)
    second = core.journal.read(first.records[-1].seq, 4)
    assert [r.request_id for r in first.records + second.records] == list(outputs)
    assert core.handle("gw", make_message("new")) == []


def test_a_request_is_open_from_the_moment_it_is_accepted(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", make_message())
    assert core.journal.read(0, 10).open_request_ids == ("r1",)
    run_until_idle(core)
    assert core.journal.read(0, 10).open_request_ids == ()


def test_another_engines_settled_position_deletes_nothing_here(tmp_path):
    core = make_core(tmp_path)
    core.handle("gw", make_message())
    run_until_idle(core)
    stranger = ReadJournal(engine_id="eng-before-the-disk-was-wiped", settled_seq=999)
    ((_, answer),) = core.handle("gw", stranger)
    assert (answer.engine_id, answer.records, answer.complete) == ("eng-1", (), False)
    assert len(core.journal.read(0, 10).records) == 1
