import asyncio
import itertools
import json
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.messages import PROOF_TENANT
from registry.errors import Conflict
from server.accounts.tenants import set_details
from server.billing import holds, ledger, statements
from server.billing.audit.run import audit
from server.billing.exports.focus import focus_rows
from server.billing.months import end_of, month_of
from server.billing.rating import kept_amount
from server.billing.receipts.check import ReceiptCheck, statement_faults
from server.billing.receipts.receipt import CHARGES
from server.billing.receipts.signing_keys import record_key
from server.billing.statement_figures import StatementFigures
from server.billing.statements import GRACE_MS, MAX_GRACE_MS, Statements
from server.billing.storage_charges import ACCOUNTS
from server.billing.tables import entries, journal_positions, metadata, tenant_accounts
from server.database.database import Database
from tests.server.export_ledger import give, keep
from tests.server.factories import (
    SIGNER,
    make_end,
    make_hold,
    make_price,
    make_tenant,
    post_ends,
    receipts_of,
)
from tests.server.receipt_makers import make_rows, seal

KEYS = {SIGNER.key_id: SIGNER.public}
DAY_MS = 86_400_000


def at(text):
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


class Book:
    """A ledger whose time, `now_ms`, the test sets."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now_ms = at("2026-11-05")
        self.waits = []
        self.statements = Statements(
            database, SIGNER, now_ms=lambda _: self.now_ms, note_waits=self.waits.append
        )
        self.price = make_price(database)
        self._numbers = itertools.count(1)

    def write(self, fn):
        return self.database.write_sync(fn)

    def hold(self, tenant_id="ten_1"):
        request_id = f"r{next(self._numbers)}"
        hold = make_hold(
            self.price, request_id, tenant_id=tenant_id, created_at_ms=self.now_ms,
            expires_at_ms=self.now_ms + 150_000,
        )  # fmt: skip
        self.write(lambda conn: holds.insert_hold(conn, hold))
        return request_id

    def use(self, at_ms=None, tenant_id="ten_1", **fields):
        """Settle a request now that ended at `at_ms`."""
        at_ms, request_id = at_ms or self.now_ms, self.hold(tenant_id)
        end = make_end(
            int(request_id[1:]), request_id, tenant_id=tenant_id, at=at_ms / 1000, **fields
        )
        post_ends(self.database, end, now_ms=self.now_ms)

    def keep(self, at_ms=None, tenant_id="ten_1"):
        """Charge the storage of an adapter for an hour."""
        keep(self.database, tenant_id, at_ms or self.now_ms, self.now_ms)

    def pay(self, amount_nanousd, at_ms=None, tenant_id="ten_1"):
        at_ms = at_ms or self.now_ms
        give(self.database, "payment", tenant_id, amount_nanousd, at_ms, self.now_ms, memo="wire")

    def read(self, fn, *args):
        return self.database.read_sync(lambda conn: fn(conn, *args))

    def statement(self, period, tenant_id="ten_1"):
        return self.read(statements.get_statement, tenant_id, period)

    def issued(self, tenant_id="ten_1"):
        return [found.period for found in self.read(statements.list_statements, tenant_id, 99)]

    def open(self, tenant_id="ten_1"):
        return self.read(statements.open_periods, tenant_id)

    def findings(self, statement):
        """Findings of a statement alone, and against the receipts of the whole ledger."""
        check = ReceiptCheck(KEYS, is_complete=True, statement=statement.values)
        sealed = statement.values, statement.sha256, statement.signature
        for fault in statement_faults(*sealed, KEYS):
            check.note(*fault)
        receipts = receipts_of(self.database)
        for row, receipt in enumerate(receipts, start=1):
            check.add(row, receipt)
        check.finish()
        return [str(finding) for finding in check.findings]


@pytest.fixture
def book(each_database):
    return Book(each_database)


@pytest.fixture
def sqlite_book(sqlite_database):
    return Book(sqlite_database)


def test_a_statement_says_what_a_month_came_to(book):
    book.use(num_prompt_tokens=100, num_cached_tokens=40, num_completion_tokens=7)
    book.use(num_prompt_tokens=10, num_completion_tokens=1)
    book.use(finish_reason="error", stop_cause="engine_failure")
    book.keep()
    book.pay(10**9)
    book.now_ms = at("2026-12-01")
    found = book.statements.issue("ten_1", "2026-11")
    values = found.values
    charged = 70 * 150 + 40 * 75 + 8 * 600
    stored = kept_amount(12_345_678, 3_599_993, book.price.storage_nanousd)
    assert values["totals"] == {
        "payment": {"num_entries": 1, "amount_nanousd": -(10**9)},
        "storage": {"num_entries": 1, "amount_nanousd": stored},
        "usage": {"num_entries": 3, "amount_nanousd": charged},
    }
    assert values["total_nanousd"] == found.total_nanousd == charged + stored - 10**9
    assert values["opening_balance_nanousd"] == 0
    assert values["closing_balance_nanousd"] == values["total_nanousd"]
    assert (values["num_entries"], found.num_entries) == (5, 5)
    assert (values["first_receipt_seq"], values["last_receipt_seq"]) == (1, 5)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    assert [values[name] for name in names] == [117, 40, 13]
    lines = [
        (line["meter"], line["unit_nanousd"], line["quantity"], line["amount_nanousd"])
        for line in values["lines"]
    ]
    assert lines == [
        ("gb_hours", book.price.storage_nanousd, "0.012345654", stored),
        ("cached_tokens", 75, "40", 3000),
        ("completion_tokens", 0, "5", 0),
        ("completion_tokens", 600, "8", 4800),
        ("prompt_tokens", 0, "7", 0),
        ("prompt_tokens", 150, "70", 10_500),
    ]
    [payment] = values["payments"]
    assert (payment["memo"], payment["amount_nanousd"]) == ("wire", -(10**9))
    assert book.findings(found) == []


def test_every_line_is_its_quantity_times_its_price_and_all_come_to_the_charges():
    """Entries of kept bytes are rounded one by one, so the rest of all is a line of its own."""
    for seed in range(5):
        receipts, figures = seal(make_rows(seed, 300, ["ten_1"])), StatementFigures()
        for receipt in receipts:
            figures.add(receipt)
        lines = figures.document()["lines"]
        assert {"gb_hours", "rounding", "prompt_tokens"} <= {line["meter"] for line in lines}
        for line in lines:
            product = Decimal(line["quantity"]) * line["unit_nanousd"]
            assert product.to_integral_value(ROUND_HALF_UP) == line["amount_nanousd"], line
        charges = [r["amount_nanousd"] for r in receipts if r["kind"] in CHARGES]
        assert sum(line["amount_nanousd"] for line in lines) == sum(charges)


def test_a_statement_is_addressed_as_the_tenant_was_when_it_was_issued(sqlite_database):
    book = Book(sqlite_database)
    tenant_id = make_tenant(sqlite_database, "acme").tenant_id

    def address(**details):
        book.write(lambda conn: set_details(conn, tenant_id, details, now_ms=book.now_ms))

    address(legal_name="Acme Ltd.", address="1 Main Street\nSpringfield")
    book.use(tenant_id=tenant_id)
    book.now_ms = at("2026-12-01")
    issued = book.statements.issue(tenant_id, "2026-11")
    address(legal_name="Acme GmbH", address=None)
    assert book.statement("2026-11", tenant_id) == issued
    assert issued.values["legal_name"] == "Acme Ltd."
    assert issued.values["address"] == "1 Main Street\nSpringfield"
    book.use(tenant_id=tenant_id)
    book.now_ms = at("2027-01-01")
    later = book.statements.issue(tenant_id, "2026-12").values
    assert (later["legal_name"], later["address"]) == ("Acme GmbH", None)


def test_a_statement_is_issued_once_and_never_changes(sqlite_book):
    sqlite_book.use()
    sqlite_book.now_ms = at("2026-12-01")
    first = sqlite_book.statements.issue("ten_1", "2026-11")
    sqlite_book.use(at_ms=at("2026-11-30"))
    sqlite_book.now_ms += DAY_MS
    assert (
        sqlite_book.statements.issue("ten_1", "2026-11")
        == first
        == sqlite_book.statement("2026-11")
    )
    sqlite_book.statements.issue_due()
    assert sqlite_book.statement("2026-11") == first


def test_a_month_that_is_not_over_has_none(sqlite_book):
    sqlite_book.use()
    sqlite_book.now_ms = end_of("2026-11") - 1
    with pytest.raises(Conflict):
        sqlite_book.statements.issue("ten_1", "2026-11")
    assert sqlite_book.issued() == []


def test_months_are_due_an_hour_after_their_end_when_all_is_settled(book):
    book.use()
    running = book.hold()
    book.now_ms = end_of("2026-11") + GRACE_MS
    book.hold()  # a hold of the new month does not delay the old one's statement
    assert book.statements.issue_due() == 0
    book.write(lambda conn: holds.void_refused(conn, running, book.now_ms))
    book.now_ms -= 1
    assert book.statements.issue_due() == 0
    book.now_ms += 1
    assert book.statements.issue_due() == 1
    assert book.issued() == ["2026-11"]


def test_an_entry_of_a_month_that_had_none_is_after_all_statements_and_the_audit_agrees(
    sqlite_book,
):
    sqlite_book.write(lambda conn: record_key(conn, SIGNER.public, sqlite_book.now_ms))
    sqlite_book.use()
    sqlite_book.now_ms = at("2026-12-02")
    sqlite_book.statements.issue("ten_1", "2026-11")
    sqlite_book.use(at("2026-09-05"))
    late = receipts_of(sqlite_book.database)[-1]
    assert late["period"] == "2026-12"
    report = sqlite_book.read(audit)
    assert [found for found in report.findings if found.check == "statements"] == []


def test_a_correction_of_an_issued_month_is_on_the_next_statement_and_named_so_in_focus(
    sqlite_book,
):
    sqlite_book.use()
    sqlite_book.now_ms = at("2026-12-02")
    sqlite_book.statements.issue("ten_1", "2026-11")
    [charged] = receipts_of(sqlite_book.database)
    correction = sqlite_book.write(
        lambda conn: ledger.reverse(
            conn, SIGNER, charged["entry_id"], memo="goodwill", now_ms=sqlite_book.now_ms
        )
    )
    assert (correction["ended_at"], correction["period"]) == (charged["ended_at"], "2026-12")
    [row] = focus_rows(correction)
    assert row["ChargeClass"] == "Correction"
    assert row["InvoiceId"] == "ten_1/2026-12"
    assert row["ChargePeriodStart"] < "2026-12" <= row["BillingPeriodStart"]


def test_a_month_waits_for_what_was_kept_on_its_last_day(sqlite_book):
    def posted(day):
        row = {"settled_seq": day, "updated_at_ms": 0}
        rows = [row | {"engine_id": account} for account in ACCOUNTS]
        sqlite_book.write(lambda conn: conn.execute(sa.delete(journal_positions)))
        sqlite_book.write(lambda conn: conn.execute(sa.insert(journal_positions), rows))

    sqlite_book.use()
    last_day = end_of("2026-11") // DAY_MS - 1
    sqlite_book.now_ms = end_of("2026-11") + GRACE_MS
    posted(last_day - 1)
    assert sqlite_book.statements.issue_due() == 0
    posted(last_day)
    assert sqlite_book.statements.issue_due() == 1


def test_a_request_that_is_not_settled_in_a_day_waits_for_the_next_statement(sqlite_book):
    sqlite_book.use()
    sqlite_book.hold()
    sqlite_book.now_ms = end_of("2026-11") + MAX_GRACE_MS - 1
    assert sqlite_book.statements.issue_due() == 0
    sqlite_book.now_ms += 1
    assert sqlite_book.statements.issue_due() == 1


def test_each_turn_tells_what_waits_too_long_before_it_issues_what_is_due(sqlite_book):
    sqlite_book.use()
    sqlite_book.now_ms = end_of("2026-11") - 1
    request_id, expires_at_ms = sqlite_book.hold(), sqlite_book.now_ms + 150_000

    def turn():
        asyncio.run(sqlite_book.statements.turn())
        return list(sqlite_book.waits.pop().values())

    for num_late, left_ms in ((0, 1), (1, 0)):
        sqlite_book.now_ms = end_of("2026-11") + MAX_GRACE_MS - left_ms
        assert turn() == [
            sqlite_book.now_ms / 1000,
            (sqlite_book.now_ms - expires_at_ms) / 1000,
            num_late,
        ]
    sqlite_book.write(lambda conn: holds.void_refused(conn, request_id, sqlite_book.now_ms))
    assert turn() == [sqlite_book.now_ms / 1000, 0, 0]


def test_all_months_and_tenants_that_are_due_are_issued_the_oldest_first(sqlite_book, monkeypatch):
    book = sqlite_book
    monkeypatch.setattr(statements, "_TENANTS_PER_PAGE", 2)
    for number in range(5):
        for month in ("2026-08", "2026-10", "2026-11"):
            book.use(at_ms=at(f"{month}-11"), tenant_id=f"ten_{number}")
    book.use(at_ms=at("2026-10-11"), tenant_id=PROOF_TENANT)
    assert book.statements.issue_due() == 10, "a proof's tokens are on no statement"
    for number in range(5):
        assert book.issued(f"ten_{number}") == ["2026-10", "2026-08"]
        assert book.open(f"ten_{number}") == ["2026-11"]
        older, newer = (book.statement(p, f"ten_{number}").values for p in ("2026-08", "2026-10"))
        assert newer["opening_balance_nanousd"] == older["closing_balance_nanousd"] > 0


def test_what_is_posted_while_the_month_is_summed_is_in_it(sqlite_book, monkeypatch):
    book = sqlite_book
    for _ in range(5):
        book.use()
    book.now_ms = at("2026-12-01")
    read, seen = statements._add_page, []

    def read_and_post(conn, *args):
        page = read(conn, *args)
        if not page and not seen:
            seen.append(True)
            book.use(at_ms=at("2026-11-30"))
        return page

    monkeypatch.setattr(statements, "_add_page", read_and_post)
    monkeypatch.setattr(statements, "PAGE_SIZE", 2)
    found = book.statements.issue("ten_1", "2026-11")
    assert found.num_entries == 6
    assert book.findings(found) == []


def test_a_statement_that_was_changed_is_found(sqlite_book):
    book = sqlite_book
    book.use()
    book.keep()
    book.now_ms = at("2026-12-01")
    found = book.statements.issue("ten_1", "2026-11")
    values = found.values

    def fields(changed, sha256=found.sha256):
        return {field for field, _ in statement_faults(changed, sha256, found.signature, KEYS)}

    assert fields(values) == set()
    for name, value in values.items():
        if isinstance(value, int):
            assert "sha256" in fields(values | {name: value + 1}), name
    assert "total_nanousd" in fields(values | {"total_nanousd": 0})
    assert "closing_balance_nanousd" in fields(values | {"opening_balance_nanousd": 1})
    assert "lines" in fields(values | {"lines": values["lines"][1:]})
    assert "signature" in fields(values, sha256="0" * 64)
    assert None in fields({"signing_key": SIGNER.key_id})


def test_a_receipt_that_is_not_there_is_not_on_the_statement(sqlite_book):
    book = sqlite_book
    for _ in range(3):
        book.use()
    book.now_ms = at("2026-12-01")
    found = book.statements.issue("ten_1", "2026-11")
    receipts = receipts_of(book.database)
    check = ReceiptCheck(KEYS, statement=found.values)
    for row, receipt in enumerate([receipts[0], receipts[2]], start=1):
        check.add(row, receipt)
    check.finish()
    fields = {finding.field for finding in check.findings}
    assert {"num_entries", "receipts_sha256", "total_nanousd", "totals", "lines"} <= fields
    assert [(gap.first_seq, gap.last_seq) for gap in check.gaps] == [(2, 2)]


def test_a_copy_of_the_figures_is_added_to_alone():
    """A write may run twice, and its second run must begin with the same figures."""
    receipts, figures = seal(make_rows(2, 40, ["ten_1"])), StatementFigures()
    for receipt in receipts[:20]:
        figures.add(receipt)
    before, copy = json.dumps(figures.document()), figures.copy()
    for receipt in receipts[20:]:
        copy.add(receipt)
    assert json.dumps(figures.document()) == before
    for receipt in receipts[20:]:
        figures.add(receipt)
    assert figures.document() == copy.document()


def test_lines_beyond_the_limit_are_summed_without_their_names(monkeypatch):
    monkeypatch.setattr("server.billing.statement_figures.MAX_LINES", 4)
    monkeypatch.setattr("server.billing.statement_figures.MAX_PAYMENTS", 1)
    figures = StatementFigures()
    receipts = seal(make_rows(2, 80, ["ten_1"]))
    for receipt in receipts:
        figures.add(receipt)
    document = figures.document()
    assert len(document["payments"]) == 1
    charges = sum(r["amount_nanousd"] for r in receipts if r["amount_nanousd"] > 0)
    assert sum(line["amount_nanousd"] for line in document["lines"]) == charges
    named = [line for line in document["lines"] if line["model"] or line["adapter_id"]]
    assert len(named) <= 4 < len(document["lines"])


def test_the_month_is_read_by_its_index(sqlite_book):
    book = sqlite_book

    seen = []

    def see(conn, cursor, statement, parameters, context, executemany):
        seen.append((statement, parameters))

    def plan(conn):
        sa.event.listen(conn, "before_cursor_execute", see)
        statements._add_page(conn, "ten_1", "2026-11", StatementFigures(last_receipt_seq=7))
        statements.open_periods(conn, "ten_1")
        sa.event.remove(conn, "before_cursor_execute", see)
        asked = [one for one in seen if one[0].startswith(("SELECT", "WITH"))]
        rows = [conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", of) for text, of in asked]
        return "\n".join(row[3] for group in rows for row in group)

    said = book.read(plan)
    whole = "ix_entries_tenant_period (tenant_id=? AND period=? AND receipt_seq>?)"
    assert whole in said
    assert "ix_entries_tenant_period (tenant_id=? AND period>?)" in said
    assert "SCAN entries" not in said
    assert "TEMP B-TREE" not in said


LEDGER = (
    "statements", "entries", "tenant_accounts", "usage_events", "holds", "kept_events",
    "ledger_head", "journal_positions", "usage_rollups", "usage_days",
)  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 120), st.sampled_from(["ten_1", "ten_2"])),
        st.tuples(st.just("keep"), st.integers(0, 120), st.sampled_from(["ten_1", "ten_2"])),
        st.tuples(st.just("pay"), st.integers(0, 120), st.sampled_from(["ten_1", "ten_2"])),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just("")),
        st.tuples(st.just("issue"), st.integers(1, 120), st.sampled_from(["ten_1", "ten_2"])),
    ),
    max_size=25,
)


def run(book, steps):
    """Run one history; entries are late by up to four months."""
    for what, days, tenant_id in steps:
        before = book.now_ms - days * DAY_MS
        if what == "wait":
            book.now_ms += days * DAY_MS
            book.statements.issue_due()
        elif what == "issue":
            for period in book.open(tenant_id):
                if period <= month_of(before) and end_of(period) <= book.now_ms:
                    book.statements.issue(tenant_id, period)
        elif what == "pay":
            book.pay(days * 10**6, before, tenant_id)
        else:
            getattr(book, what)(before, tenant_id)


def assert_everything_is_on_one_statement(book):
    for tenant_id in ("ten_1", "ten_2"):
        query = sa.select(tenant_accounts.c.balance_nanousd).filter_by(tenant_id=tenant_id)
        balance = book.read(lambda conn, q=query: conn.scalar(q)) or 0
        count = sa.select(sa.func.count()).select_from(entries).filter_by(tenant_id=tenant_id)
        issued = [book.statement(period, tenant_id) for period in book.issued(tenant_id)]
        unissued = [
            book.read(statements.open_period, tenant_id, period) for period in book.open(tenant_id)
        ]
        both = [*issued, *unissued]
        assert sum(found.total_nanousd for found in both) == -balance
        assert sum(found.num_entries for found in both) == book.read(
            lambda conn, q=count: conn.scalar(q)
        )
        assert all(book.findings(found) == [] for found in issued)


def check_histories(book, max_examples):
    """Check random histories, each on an empty ledger."""

    @settings(max_examples=max_examples, deadline=None)
    @given(steps=STEPS)
    def check(steps):
        with book.database.begin() as conn:
            for name in LEDGER:
                conn.execute(sa.delete(metadata.tables[name]))
        book.now_ms = at("2026-11-05")
        run(book, steps)
        assert_everything_is_on_one_statement(book)

    check()


def test_statements_and_what_is_open_are_all_that_was_posted(sqlite_book):
    """Random histories also check every statement offline against its receipts."""
    check_histories(sqlite_book, max_examples=8)


@pytest.mark.soak
def test_statements_and_what_is_open_are_all_that_was_posted_in_many_histories(book):
    check_histories(book, max_examples=200)
