"""Old holds are deleted, and nobody who reads the ledger gets another answer without them."""

import asyncio
import shutil

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from server.billing import ledger, old_holds
from server.billing.audit.run import audit
from server.billing.budgets import read_sums
from server.billing.holds import void_refused
from server.billing.old_holds import DAY_MS, KEPT_MS, OldHolds
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.simulate import Book, simulate
from server.billing.tables import holds
from server.billing.usage import sum_entries
from server.database.clock import now_ms
from server.database.database import DEFAULT_FILE, Database
from tests.server.audited_ledger import TENANTS, fill_ledger, make_ends
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
)

FOREVER_MS = 2**62


def turn(database, at_ms):
    asyncio.run(OldHolds(database, now_ms=lambda _: at_ms).turn())


def held(database):
    rows = database.read_sync(lambda c: c.execute(sa.select(holds)).all())
    return {row.request_id: row for row in rows}


def answers(database, at_ms):
    """What tenants and operators read, apart from the number of holds that were audited."""

    def read(conn):
        report = audit(conn)
        report.checks["holds"].num_rows = 0
        return (
            report.checks,
            list(iterate_receipts(conn, select_receipts())),
            sum_entries(conn, 0, FOREVER_MS, ("tenant", "kind", "model", "hour")),
            [read_sums(conn, tenant_id, at_ms) for tenant_id in TENANTS],
        )

    simulated = asyncio.run(simulate(database, Book({}), 0, FOREVER_MS))
    return database.read_sync(read), simulated


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), days=st.integers(0, 40))
def test_what_is_deleted_is_never_needed(migrated_sqlite, tmp_path_factory, seed, days):
    folder = tmp_path_factory.mktemp("old")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    database = Database(data_dir=folder)
    try:
        fill_ledger(database, make_ends(24, seed=seed))
        at_ms = NOW_MS + days * DAY_MS
        before, had = answers(database, at_ms), held(database)
        turn(database, at_ms)
        assert answers(database, at_ms) == before
        left = held(database)
        for request_id, row in had.items():
            is_old = row.state in KEPT_MS and row.resolved_at_ms < at_ms - KEPT_MS[row.state]
            assert (request_id not in left) == (is_old and row.failed_at_ms is None)
    finally:
        database.close()


@pytest.fixture
def held_database(database):
    """Ten holds that were posted at NOW_MS."""
    price = make_price(database)
    insert_holds(database, *(make_hold(price, f"r{seq}") for seq in range(1, 11)))
    ends = [make_end(seq, f"r{seq}") for seq in range(1, 11)]
    database.write_sync(lambda c: ledger.post(c, SIGNER, ENGINE, ends, NOW_MS))
    return database


def test_holds_are_deleted_in_batches_once_they_are_old(held_database, monkeypatch):
    monkeypatch.setattr(old_holds, "MAX_AT_ONCE", 3)
    turn(held_database, NOW_MS + KEPT_MS["posted"])
    assert len(held(held_database)) == 10
    turn(held_database, NOW_MS + KEPT_MS["posted"] + 1)
    assert held(held_database) == {}


def test_a_failure_that_is_noted_after_its_hold_is_gone_is_reversed(held_database):
    turn(held_database, NOW_MS + 3 * DAY_MS)
    receipt = held_database.write_sync(
        lambda c: ledger.mark_failed(c, SIGNER, "r3", NOW_MS + 3 * DAY_MS)
    )
    assert (receipt["kind"], receipt["reverses_entry_id"]) == ("correction", 3)


def test_a_voided_hold_stays_longer_and_with_an_event_for_good(held_database):
    price = make_price(held_database)
    insert_holds(held_database, *(make_hold(price, name) for name in ("refused", "lost")))
    late = make_end(11, "lost")

    def void(conn):
        void_refused(conn, "refused", NOW_MS)
        void_refused(conn, "lost", NOW_MS)
        ledger.post(conn, SIGNER, ENGINE, [late], NOW_MS + 29 * DAY_MS)

    held_database.write_sync(void)
    turn(held_database, NOW_MS + 29 * DAY_MS)
    assert held(held_database).keys() == {"refused", "lost"}
    turn(held_database, NOW_MS + 31 * DAY_MS)
    assert held(held_database).keys() == {"lost"}


def test_a_hold_that_is_gone_before_its_time_is_a_finding(held_database):
    def find(posted_at_ms, name):
        end = make_end(11 + int(name), name)
        insert_holds(held_database, make_hold(make_price(held_database), name))

        def post_and_lose(conn):
            ledger.post(conn, SIGNER, ENGINE, [end], posted_at_ms)
            conn.execute(sa.delete(holds).filter_by(request_id=name))

        held_database.write_sync(post_and_lose)
        return [f.subject for f in held_database.read_sync(audit).findings if f.check == "holds"]

    assert find(now_ms() - KEPT_MS["posted"], "0") == []
    assert find(now_ms(), "1") == ["hold 1"]
