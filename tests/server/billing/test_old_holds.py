"""Old holds are deleted, and nobody who reads the ledger gets another answer without them."""

import asyncio
import shutil

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from server.billing import ledger, old_holds
from server.billing.audit.run import audit
from server.billing.holds import insert_hold
from server.billing.old_holds import KEPT_MS, delete_old_holds
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.simulate import simulate
from server.billing.tables import holds
from server.billing.usage import sum_entries
from server.database.clock import now_ms
from server.database.database import DEFAULT_FILE, Database
from tests.server.audited_ledger import fill_ledger, make_ends
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold, make_price


def turn(database, days):
    asyncio.run(delete_old_holds(database, NOW_MS + days * KEPT_MS // 2 + 1))
    return held(database)


def held(database):
    rows = database.read_sync(lambda c: c.execute(sa.select(holds)).all())
    return {row.request_id: row for row in rows}


def answers(database):
    """Return what tenants and operators read, apart from the number of holds that were audited."""

    def read(conn):
        report = audit(conn)
        report.checks["holds"].num_rows = 0
        usage = sum_entries(conn, 0, 2**62, ("tenant", "kind", "model", "hour"))
        return report.checks, list(iterate_receipts(conn, select_receipts())), usage

    return database.read_sync(read), asyncio.run(simulate(database, {}, 0, 2**62))


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), days=st.integers(0, 40))
def test_what_is_deleted_is_never_needed(migrated_sqlite, tmp_path_factory, seed, days):
    folder = tmp_path_factory.mktemp("old")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    database = Database(data_dir=folder)
    fill_ledger(database, make_ends(16, seed=seed))
    before, had = answers(database), held(database)
    left = turn(database, days)
    assert answers(database) == before
    database.close()
    for request_id, row in had.items():
        is_past = row.state == "posted" and row.failed_at_ms is None
        is_old = is_past and row.resolved_at_ms + KEPT_MS <= NOW_MS + days * KEPT_MS // 2
        assert (request_id not in left) == is_old, row


@pytest.fixture
def ten(each_database):
    """Ten holds, of which the first eight were posted at NOW_MS."""
    made = [make_hold(make_price(each_database), f"r{seq}") for seq in range(1, 11)]
    each_database.write_sync(lambda c: [insert_hold(c, hold) for hold in made])
    post(each_database, NOW_MS, *range(1, 9))
    return each_database


def post(database, at_ms, *seqs):
    ends = [make_end(seq, f"r{seq}") for seq in seqs]
    database.write_sync(lambda c: ledger.post(c, SIGNER, ENGINE, ends, at_ms))


def test_old_holds_go_in_batches_and_a_failure_is_reversed_all_the_same(ten, monkeypatch):
    monkeypatch.setattr(old_holds, "MAX_AT_ONCE", 3)
    assert turn(ten, 2).keys() == {"r9", "r10"}
    receipt = ten.write_sync(lambda c: ledger.mark_failed(c, SIGNER, "r3", NOW_MS))
    assert (receipt["kind"], receipt["reverses_entry_id"]) == ("correction", 3)


def test_a_hold_that_is_gone_before_its_time_is_a_finding(ten):
    post(ten, now_ms() - KEPT_MS, 9)
    post(ten, now_ms(), 10)
    ten.write_sync(lambda c: c.execute(sa.delete(holds)))
    assert [f.subject for f in ten.read_sync(audit).checks["holds"].findings] == ["hold r10"]
