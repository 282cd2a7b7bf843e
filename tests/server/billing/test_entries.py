from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.billing.entries import Draft, post_entries
from server.billing.months import month_of, next_month
from server.billing.receipts.receipt import (
    FIELDS,
    GENESIS,
    SEAL,
    canonical,
    sha256_of,
    tenant_account,
)
from server.billing.tables import ledger_head, statements, tenant_accounts, usage_rollups
from server.database.database import Database
from tests.server.factories import NOW_MS, SIGNER, receipts_of

TENANTS = ("ten_1", "ten_2", "ten_3")
HOUR_MS = 3_600_000


def charge(tenant_id="ten_1", amount=7, at_ms=NOW_MS, **fields):
    return Draft.charge("usage", tenant_id, amount, at_ms=at_ms, **fields)


def credit(tenant_id="ten_1", amount=7, at_ms=NOW_MS):
    return Draft(
        kind="credit",
        tenant_id=tenant_id,
        debit_account="expense/credits",
        credit_account=tenant_account(tenant_id),
        amount_nanousd=amount,
        at_ms=at_ms,
        memo="=welcome, 'friend'",
    )


def post(database, *drafts, now_ms=NOW_MS):
    return database.write_sync(lambda c: post_entries(c, SIGNER, drafts, now_ms))


def rows(database, table):
    return database.read_sync(lambda c: list(c.execute(sa.select(table)).mappings()))


def check_chains(receipts):
    before = {}
    for receipt in receipts:
        seq, sha256 = before.get(receipt["tenant_id"], (0, GENESIS))
        assert (receipt["receipt_seq"], receipt["prev_sha256"]) == (seq + 1, sha256)
        assert receipt["sha256"] == sha256_of(receipt)
        assert SIGNER.public.is_signed(receipt["sha256"], receipt["signature"])
        before[receipt["tenant_id"]] = (seq + 1, receipt["sha256"])
    return before


def test_what_is_posted_is_what_is_read_again(each_database):
    posted = post(each_database, charge(), credit("ten_2"), charge(amount=0))
    assert sorted(receipts_of(each_database), key=lambda r: r["entry_id"]) == posted
    assert [receipt["entry_id"] for receipt in posted] == [1, 2, 3]
    assert [receipt["amount_nanousd"] for receipt in posted] == [7, -7, 0]
    assert posted[1]["amount_usd"] == "-0.000000007"


def test_a_receipt_has_every_field_and_its_hash_all_that_have_a_value():
    assert not FIELDS.keys() & set(SEAL)
    row = dict.fromkeys(FIELDS) | {"tenant_id": "t", "kind": "usage", "memo": "\u00e9"}
    # Zero and false are values; only fields without a meaning are left out.
    row |= {"prompt_tokens": 0, "is_failed": False}
    assert canonical(row) == (
        b'{"is_failed":false,"kind":"usage","memo":"\xc3\xa9","prompt_tokens":0,'
        b'"schema":"chorale.receipt/1","tenant_id":"t"}'
    )


amounts = st.integers(0, 10**12)
drafts = st.builds(
    lambda make, tenant, amount, hours: make(tenant, amount, NOW_MS + hours * HOUR_MS),
    st.sampled_from([charge, credit]),
    st.sampled_from(TENANTS),
    amounts,
    st.integers(-2000, 2000),
)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(groups=st.lists(st.lists(drafts, max_size=6), max_size=5))
def test_chains_balances_and_rollups_follow_from_the_entries(sqlite_database, groups):
    before = receipts_of(sqlite_database)
    for group in groups:
        post(sqlite_database, *group)
    receipts = receipts_of(sqlite_database)
    assert len(receipts) == len(before) + sum(map(len, groups))
    ends = check_chains(receipts)
    for account in rows(sqlite_database, tenant_accounts):
        own = [r for r in receipts if r["tenant_id"] == account["tenant_id"]]
        assert account["balance_nanousd"] == -sum(r["amount_nanousd"] for r in own)
        end = (account["receipt_seq"], account["receipt_sha256"])
        assert end == ends[account["tenant_id"]]
    sums = rows(sqlite_database, usage_rollups)
    charges = [receipt for receipt in receipts if receipt["kind"] == "usage"]
    assert sum(row["num_requests"] for row in sums) == len(charges)
    assert sum(row["amount_nanousd"] for row in sums) == sum(
        receipt["amount_nanousd"] for receipt in receipts
    )
    for row in sums:
        assert row["hour_ms"] % HOUR_MS == 0


def test_posters_at_the_same_time_leave_numbers_without_gaps_and_whole_chains(
    database_url, tmp_path
):
    """Two gateways post at once, each from its writer and from worker threads."""
    databases = [Database(database_url, data_dir=tmp_path, exclusive=False) for _ in range(2)]

    def work(database, number):
        for i in range(15):
            group = [charge(tenant) for tenant in (TENANTS if number % 2 else TENANTS[::-1])]
            with database.begin() as conn:
                post_entries(conn, SIGNER, group[: 1 + i % 3], NOW_MS)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, databases * 2, range(4)))
    receipts = receipts_of(databases[0])
    assert sorted(r["entry_id"] for r in receipts) == list(range(1, 4 * 30 + 1))
    check_chains(receipts)
    assert rows(databases[0], ledger_head)[0]["last_entry_id"] == len(receipts)
    for database in databases:
        database.close()


def test_a_post_that_is_undone_leaves_no_number_missing(database):
    def fail(conn):
        post_entries(conn, SIGNER, [charge()], NOW_MS)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        database.write_sync(fail)
    assert [receipt["entry_id"] for receipt in post(database, charge())] == [1]
    check_chains(receipts_of(database))


def test_what_comes_after_a_statement_is_on_the_next_open_one(database):
    month = month_of(NOW_MS)
    issued = {"issued_at_ms": NOW_MS, "num_entries": 0, "total_nanousd": 0, "document": "{}"}
    seal = {"sha256": "0" * 64, "signing_key": "k", "signature": "s"}
    values = [
        {"tenant_id": "ten_1", "period": period, **issued, **seal}
        for period in (month, next_month(month))
    ]
    database.write_sync(lambda c: c.execute(sa.insert(statements), values))
    late, other = post(database, charge("ten_1"), charge("ten_2"))
    assert late["period"] == next_month(next_month(month))
    assert other["period"] == month
