"""An export has every entry of its time once, the same in five formats."""

import asyncio
import io
import itertools
import json

import pytest
import sqlalchemy as sa

from engine.wire.messages import PROOF_TENANT
from server.billing.exports import pages
from server.billing.exports.csv_rows import cell, parse_cell
from server.billing.exports.formats import FORMATS, open_encoder
from server.billing.exports.pages import Place, Range, last_entry_id, read_page
from server.billing.exports.reading import read_export
from server.billing.exports.stream import stream
from server.billing.receipts.receipt import COLUMNS
from server.billing.receipts.rows import sealed_receipt, select_receipts
from server.billing.tables import entries
from tests.server.export_ledger import TEXTS, exported, fill, use
from tests.server.factories import NOW_MS


def read(chunks):
    return list(read_export(io.BytesIO(b"".join(chunks))))


def ledger_of(database, *where):
    """The receipts that an export must have, by one plain query."""
    query = select_receipts().where(*where)
    query = query.order_by(entries.c.tenant_id, entries.c.receipt_seq)
    return database.read_sync(
        lambda conn: [sealed_receipt(dict(row)) for row in conn.execute(query).mappings()]
    )


def test_five_formats_and_the_ledger_have_the_same_receipts(each_database):
    fill(each_database, 1, 40)
    for tenant_id in ("ten_1", "ten_2"):
        receipts = ledger_of(each_database, entries.c.tenant_id == tenant_id)
        charges = [r for r in receipts if "cash" not in r["debit_account"] + r["credit_account"]]
        for format in FORMATS:
            found = read(exported(each_database, format, tenant_id))
            assert found == (charges if format == "focus" else receipts), format


def test_all_tenants_follow_one_another_each_in_its_own_order(each_database):
    fill(each_database, 3, 30)
    use(each_database, PROOF_TENANT)
    found = read(exported(each_database, "jsonl", page_size=4))
    assert found == ledger_of(each_database, entries.c.tenant_id != PROOF_TENANT)
    places = [(r["tenant_id"], r["receipt_seq"]) for r in found]
    assert places == sorted(set(places))
    assert {tenant_id for tenant_id, _ in places} == {"ten_1", "ten_2"}


@pytest.mark.parametrize("page_size", [1, 3, 500])
def test_a_time_includes_its_start_and_not_its_end(sqlite_database, page_size):
    database = sqlite_database
    for number in range(12):  # posted in another order than their times
        use(database, f"ten_{number % 3}", at_ms=NOW_MS + number * 7 % 12)
    for start, end in itertools.combinations(range(0, 13, 3), 2):
        start_ms, end_ms = NOW_MS + start, NOW_MS + end
        for tenant_id in (None, "ten_1"):
            found = read(
                exported(
                    database, "jsonl", tenant_id, start_ms=start_ms, end_ms=end_ms,
                    page_size=page_size,
                )
            )  # fmt: skip
            within = [entries.c.at_ms >= start_ms, entries.c.at_ms < end_ms]
            own = [] if tenant_id is None else [entries.c.tenant_id == tenant_id]
            assert found == ledger_of(database, *within, *own)


def test_what_is_posted_during_an_export_is_not_in_it(each_database):
    use(each_database, count=2)

    async def run():
        within = Range.clamped("ten_1", 0, 2**70, each_database.read_sync(
            lambda conn: last_entry_id(conn, "ten_1")
        ))  # fmt: skip
        chunks = stream(each_database, open_encoder("jsonl"), within, page_size=1)
        first = [await anext(chunks), await anext(chunks)]
        await asyncio.to_thread(use, each_database, "ten_1", 3)
        return [*first, *[chunk async for chunk in chunks]]

    assert len(read(asyncio.run(run()))) == 2
    assert len(read(exported(each_database, "jsonl", page_size=1))) == 5


def test_an_export_of_nothing_is_a_header(database):
    for format in FORMATS:
        assert read(exported(database, format, "nobody")) == []
    assert b"".join(exported(database, "csv")).decode() == ",".join(COLUMNS) + "\r\n"
    assert b"".join(exported(database, "jsonl")) == b""


def test_a_page_is_one_short_read_of_a_stretch_however_little_is_in_it(sqlite_database):
    """Two entries of the time lie around two hundred others, which no read walks through."""
    database = sqlite_database
    for at_ms, count in ((1000, 1), (NOW_MS, 200), (1000, 1)):
        use(database, count=count, at_ms=at_ms)
    within = Range.clamped("ten_1", 0, 2000, 2**62)

    def read_all(conn):
        place = Place()
        while place is not None:
            page = read_page(conn, within, place, 10)
            yield [r["receipt_seq"] for r in page.receipts]
            place = page.next

    assert database.read_sync(lambda conn: list(read_all(conn))) == [[1], [202], []]


def test_what_was_posted_behind_the_bound_is_not_walked_through(sqlite_database):
    database = sqlite_database
    use(database, count=1)
    use(database, count=200)
    within = Range.clamped("ten_1", 0, 2**70, 1)
    first = database.read_sync(lambda conn: read_page(conn, within, Place(), 10))
    rest = database.read_sync(lambda conn: read_page(conn, within, first.next, 10))
    assert [r["receipt_seq"] for r in first.receipts] == [1]
    assert (rest.receipts, rest.next) == ((), None)


def test_many_tenants_without_anything_take_several_reads(sqlite_database, monkeypatch):
    monkeypatch.setattr(pages, "MAX_STEPS", 4)
    database = sqlite_database
    names = [f"ten_{number}" for number in range(6)]
    for name in names:
        use(database, name, at_ms=1000)
    use(database, names[-1], at_ms=NOW_MS)
    within = Range.clamped(None, NOW_MS, 2**70, 2**70)
    page = database.read_sync(lambda conn: read_page(conn, within, Place()))
    assert (page.receipts, page.next) == ((), Place(names[3]))
    found = read(exported(database, "jsonl", start_ms=NOW_MS))
    assert [r["tenant_id"] for r in found] == [names[-1]]


def test_every_query_of_a_page_is_answered_by_an_index_and_no_sort(sqlite_database):
    """Indexes make a day of a long history as quick to find as one of a short history."""
    plans = []

    def explain(conn, cursor, statement, parameters, context, many):
        if statement.startswith("SELECT"):
            raw = conn.connection.driver_connection
            plans.append(
                [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            )

    use(sqlite_database, count=3)
    sa.event.listen(sqlite_database.engine, "after_cursor_execute", explain)
    within = Range.clamped("ten_1", NOW_MS, NOW_MS + 9, 2**62)
    assert len(sqlite_database.read_sync(lambda c: read_page(c, within, Place())).receipts) == 3
    by_time, by_seq = plans
    # The index of times covers the query, so that no entry is read to find the first.
    assert by_time == [
        "SEARCH entries USING COVERING INDEX ix_entries_tenant_at"
        " (tenant_id=? AND at_ms>? AND at_ms<?)"
    ]
    assert "(tenant_id=? AND receipt_seq>? AND receipt_seq<?)" in by_seq[0]
    assert not any("SCAN" in step or "TEMP B-TREE" in step for step in by_seq)


@pytest.mark.parametrize("text", [None, "", *TEXTS])
def test_a_cell_is_no_formula_and_comes_back_as_it_was(text):
    written = cell(text)
    assert parse_cell(written) == text
    assert not written.startswith(("=", "+", "@", "\t", "\r"))
    assert not written.startswith("-") or float(written) < 0


def test_a_file_of_csv_or_json_lines_has_every_column(sqlite_database):
    use(sqlite_database, model="=bot", num_completion_tokens=9, at_ms=NOW_MS + 1234)
    [line] = b"".join(exported(sqlite_database, "jsonl")).splitlines()
    row = json.loads(line)
    assert tuple(row) == COLUMNS
    assert (row["model"], row["adapter_digest"], row["is_failed"]) == ("=bot", None, False)
    assert row["ended_at"] == "2026-02-02T02:40:01.234Z"
    header, line = b"".join(exported(sqlite_database, "csv")).decode().splitlines()
    cells = dict(zip(header.split(","), line.split(","), strict=True))
    assert tuple(cells) == COLUMNS
    assert (cells["model"], cells["adapter_digest"], cells["is_failed"]) == ("'=bot", "", "false")
