"""A file reads back as it was written, or the line that differs is named."""

import io
import json
from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.billing.exports.formats import FORMATS, open_encoder
from server.billing.exports.reading import MAX_LINE_BYTES, ExportUnreadable, read_export
from server.billing.receipts.receipt import COLUMNS, SEAL, TYPES
from tests.server.receipt_makers import make_rows, seal

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: TEXTS,
    bool: st.booleans(),
}
NEVER_NULL = ("entry_id", "kind", "tenant_id", "receipt_seq", "amount_nanousd", *SEAL)
RECEIPTS = st.fixed_dictionaries(
    {
        name: VALUES[type] if name in NEVER_NULL else st.none() | VALUES[type]
        for name, type in TYPES.items()
    }
)


def written(format, receipts):
    return b"".join(pieces(format, receipts))


def pieces(format, receipts):
    """The file's beginning, the bytes of each receipt, and the file's end."""
    encoder = open_encoder(format)
    return [encoder.begin(), *[encoder.add([receipt]) for receipt in receipts], encoder.end()]


def read(content):
    return list(read_export(io.BytesIO(content)))


def receipts_or_line(content):
    """The receipts that are read, or the number of the line that cannot be read."""
    try:
        return read(content)
    except ExportUnreadable as error:
        return error.line


@settings(deadline=None, max_examples=40)
@given(receipts=st.lists(RECEIPTS, max_size=3), format=st.sampled_from(("csv", "jsonl", "parquet")))
def test_any_receipts_come_back_as_they_were(receipts, format):
    assert read(written(format, receipts)) == receipts


@pytest.mark.parametrize("format", FORMATS)
def test_true_receipts_come_back_as_they_were(format, receipts, tmp_path):
    path = tmp_path / "export"
    path.write_bytes(written(format, receipts))
    wanted = [r for r in receipts if format != "focus" or r["kind"] != "payment"]
    assert list(read_export(path)) == wanted


@pytest.mark.parametrize("format", ["jsonl", "cloudevents"])
def test_a_line_is_one_to_who_ends_lines_as_unicode_does(format):
    memo = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029ä"
    receipts = [receipt | {"memo": memo} for receipt in seal(make_rows(seed=1, count=3))]
    content = written(format, receipts)
    assert len(content.decode().splitlines()) == len(receipts)
    assert read(content) == receipts


@pytest.fixture(scope="module")
def receipts():
    return seal(make_rows(seed=3, count=20))


@settings(deadline=None, max_examples=100)
@given(data=st.data(), format=st.sampled_from(("csv", "jsonl", "focus", "cloudevents")))
def test_another_digit_or_letter_anywhere_is_another_receipt_or_a_line_that_is_named(
    receipts, data, format
):
    parts = pieces(format, receipts)
    content = b"".join(parts)
    places = [i for i, byte in enumerate(content) if chr(byte).isalnum()]
    place = data.draw(st.sampled_from(places))
    other = b"1" if content[place : place + 1] != b"1" else b"2"
    changed = content[:place] + other + content[place + 1 :]
    found = receipts_or_line(changed)
    assert found != read(content)
    if isinstance(found, int):
        # The line is of that receipt, or the next one if the changed receipt would have more rows.
        ends = list(accumulate(part.count(b"\n") for part in parts))
        number = bisect_right(list(accumulate(map(len, parts))), place)
        assert (ends[number - 1] if number else 0) < found <= ends[number] + 1


def test_a_name_that_is_there_twice_is_refused():
    receipt, *_ = seal(make_rows(seed=1, count=1))
    line = written("jsonl", [receipt]).rstrip(b"}\n") + b',"entry_id":1}\n'
    with pytest.raises(ExportUnreadable, match="twice"):
        read(line)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("entry_id", "1"), ("entry_id", 1.0), ("entry_id", True), ("entry_id", None),
        ("is_failed", 1), ("model", 5), ("model", "\ud800"), ("colour", "red"), ("sha256", None),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_line(receipts, name, value):
    lines = written("jsonl", receipts[:3]).splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {name: value}).encode()
    with pytest.raises(ExportUnreadable) as caught:
        read(b"\n".join(lines))
    assert caught.value.line == 2
    assert name in caught.value.reason or name == "model"


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense\n1\n", b"{}\n", b"[]\n", b'{"specversion":"1.0"}\n', b"{" * 5000, b"PAR1",
        b"PAR1" + bytes(99), b"\xff\xfe\n", b"entry_id\n1,2\n", b'"', b'a\n"b', b"\x00",
    ],
)  # fmt: skip
def test_what_is_no_export_is_refused(content):
    with pytest.raises(ExportUnreadable):
        read(content)


def test_a_line_without_an_end_is_refused_before_it_is_in_memory():
    with pytest.raises(ExportUnreadable, match=f"more than {MAX_LINE_BYTES} bytes"):
        read(b"{" + b" " * 2 * MAX_LINE_BYTES)


def test_the_line_of_a_row_is_where_it_begins(receipts):
    three = [r | {"memo": "over\nthree\nlines"} for r in receipts[:3]]
    content = written("csv", three)
    broken = content.replace(b"\n" + str(three[2]["entry_id"]).encode() + b",", b"\nx,")
    with pytest.raises(ExportUnreadable) as caught:
        read(broken)
    assert caught.value.line == 8


def test_a_file_of_an_older_release_lacks_columns_that_came_later(receipts):
    values = json.loads(written("jsonl", receipts[:1]))
    del values["tier"]
    [found] = read(json.dumps(values).encode())
    assert (found["tier"], tuple(found)) == (None, COLUMNS)


@pytest.mark.parametrize("name", ["BilledCost", "SkuMeter", "x_EntryId", "ChargePeriodEnd"])
def test_a_cell_that_the_receipt_does_not_make_is_refused_by_name(receipts, name):
    from server.billing.exports import focus

    [used] = [r for r in receipts if r["kind"] == "usage"][:1]
    rows = focus.focus_cells(used)
    rows[-1][focus.COLUMNS.index(name)] += "0"
    with pytest.raises(ExportUnreadable) as caught:
        read(focus.HEADER + focus.encode_cells(rows))
    assert caught.value.line == len(rows) + 1
    assert name in caught.value.reason


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_row_that_is_missing_is_noticed(receipts, dropped):
    from server.billing.exports import focus

    cells = [focus.focus_cells(r) for r in receipts]
    first = next(i for i, rows in enumerate(cells) if len(rows) > 1)
    rows = [row for rows in cells[first : first + 2] for row in rows]
    del rows[dropped]
    with pytest.raises(ExportUnreadable):
        read(focus.HEADER + focus.encode_cells(rows))


def test_an_envelope_that_its_receipt_does_not_make_is_refused(receipts):
    event = json.loads(written("cloudevents", receipts[:1]))
    for name, value in (("id", "2"), ("subject", "ten_9"), ("extra", 1), ("time", None)):
        with pytest.raises(ExportUnreadable, match=name):
            read(json.dumps(event | {name: value}).encode())


def test_a_changed_page_of_parquet_does_not_match_its_checksum(receipts):
    content = written("parquet", receipts)
    place = content.index(receipts[0]["sha256"].encode()[:20])
    with pytest.raises(ExportUnreadable):
        read(content[:place] + b"x" + content[place + 1 :])
