"""A journal read without its engine gives all whole records in order and stays unchanged."""

import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis.strategies import builds, floats, integers, lists, text

from engine.journal.lines import (
    JournalCorrupt,
    OtherJournalVersion,
    encode,
    read_records,
    read_segment,
)
from engine.wire.records import (
    CheckpointRecord,
    EndRecord,
    ProgressRecord,
    RequestProgress,
    ResidencyItem,
    ResidencyRecord,
    StartRecord,
)
from tests.engine.fakes import make_core, make_message, run_until_idle
from tests.engine.small_disk import make_journal
from tests.engine.test_journal import segments

ITEM = ResidencyItem(
    object_key="tenants/t/d",
    adapter_id="a",
    version=1,
    digest="d",
    tier="host",
    size_bytes=5,
    slabs=0,
    duration_ms=1000,
    is_pinned=False,
)


def write_journal(directory, num_requests=3, **options):
    core = make_core(directory, journal=make_journal(directory, **options))
    core.journal.note_residency(1.0, [ITEM])
    for i in range(num_requests):
        core.handle("gw", make_message(f"r{i}", max_tokens=3))
        run_until_idle(core)
    core.journal.read(0, 1)
    return core


def content(directory):
    paths = (directory / "journal").iterdir()
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_it_reads_what_the_engine_wrote_and_writes_nothing(tmp_path):
    core = write_journal(tmp_path)
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(b"0123 [torn")
    before = content(tmp_path)
    records = list(read_records(tmp_path / "journal"))
    assert content(tmp_path) == before
    kinds = {CheckpointRecord, StartRecord, ProgressRecord, EndRecord, ResidencyRecord}
    assert {type(record) for record in records} == kinds
    settled = [r for r in records if isinstance(r, EndRecord | ResidencyRecord)]
    assert tuple(settled) == core.journal.read(0, 100).records


def test_an_empty_directory_has_no_records(tmp_path):
    assert list(read_records(tmp_path / "journal")) == []


@given(integers(-1, 10_000), integers(1, 255))
@settings(max_examples=30, deadline=None)
def test_one_changed_byte_is_found_wherever_it_is(tmp_path_factory, place, change):
    directory = tmp_path_factory.mktemp("engine")
    write_journal(directory, num_requests=1)
    whole = list(read_records(directory / "journal"))
    (path,) = segments(directory)
    data = bytearray(path.read_bytes())
    place %= len(data)
    data[place] ^= change
    path.write_bytes(data)
    if place == len(data) - 1:  # looks like an unfinished write
        assert list(read_records(directory / "journal")) == whole[:-1]
    else:
        with pytest.raises(JournalCorrupt):
            list(read_records(directory / "journal"))


def test_a_deleted_segment_in_the_middle_is_found(tmp_path):
    write_journal(tmp_path, segment_bytes=600)
    segments(tmp_path)[1].unlink()
    with pytest.raises(JournalCorrupt, match="was due"):
        list(read_records(tmp_path / "journal"))


def test_a_forged_count_does_not_add_up(tmp_path):
    """The sum of counts reveals a forged record even if its checksum is correct."""
    write_journal(tmp_path)
    lines = []
    for record in read_records(tmp_path / "journal"):
        if isinstance(record, EndRecord) and record.number == 2:
            fields = {name: getattr(record, name) for name in record.__slots__}
            record = EndRecord(**fields | {"num_completion_tokens": 2})
        lines.append(encode(record))
    segments(tmp_path)[0].write_bytes(b"".join(lines))
    with pytest.raises(JournalCorrupt, match="completion_tokens=5"):
        list(read_records(tmp_path / "journal"))


@pytest.mark.parametrize("size_bytes", [0, 40])
def test_a_segment_without_its_checkpoint_is_found(tmp_path, size_bytes):
    write_journal(tmp_path)
    (path,) = segments(tmp_path)
    os.truncate(path, size_bytes)
    with pytest.raises(JournalCorrupt, match="first line"):
        list(read_records(tmp_path / "journal"))
    with pytest.raises(JournalCorrupt, match="first line"):
        make_journal(tmp_path)


def test_a_journal_of_another_version_is_refused_with_both_versions_and_what_to_do(tmp_path):
    write_journal(tmp_path)
    (path,) = segments(tmp_path)
    first, _, rest = path.read_bytes().partition(b"\n")
    body = first[9:].replace(b'"version":1', b'"version":2,"fee":1')
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(body), body) + rest)
    refusal = "has version 2, and this build reads version 1: let the release that wrote it settle"
    with pytest.raises(OtherJournalVersion, match=refusal):
        list(read_records(tmp_path / "journal"))
    with pytest.raises(OtherJournalVersion, match=refusal):
        make_journal(tmp_path, damaged="set_aside")


def test_reading_beside_an_engine_that_deletes_begins_at_what_is_left(tmp_path):
    core = write_journal(tmp_path, segment_bytes=600)
    assert len(segments(tmp_path)) > 3
    reader = read_records(tmp_path / "journal")
    first = next(reader)
    core.journal.read(core.journal.last_seq, 1)
    assert len(segments(tmp_path)) == 1
    rest = list(reader)
    assert (first.seq, rest[-1].seq) == (0, core.journal.last_seq), "all segments were open"


PROGRESS = builds(
    RequestProgress,
    request_id=text(),
    num_prompt_tokens=integers(0),
    new_token_ids=lists(integers(0)).map(tuple),
    index=integers(0),
    num_cached_tokens=integers(0),
)


@given(floats(allow_nan=False, allow_infinity=False), lists(PROGRESS, max_size=3).map(tuple))
def test_a_steps_progress_is_the_same_when_it_is_read_again(at, requests):
    record = ProgressRecord(seq=3, at=at, step=9, requests=requests)
    assert list(read_segment(encode(record), "a segment")) == [record]
