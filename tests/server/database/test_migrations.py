import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from registry import grants
from registry.tables import audit_log, metadata
from server.accounts.keys import create_key, list_keys, rotate_key
from server.accounts.tables import api_keys
from server.billing.holds import get_hold
from server.billing.ledger import adopt_events, post
from server.billing.prices import DEFAULT_PRICES, add_price, price_for
from server.billing.receipts.receipt import sha256_of
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.tables import monthly_spend, usage_days
from server.billing.usage import sum_entries
from server.database.database import Database, DatabaseConfig, MigrationLocked, migration_config
from tests.server.audited_ledger import fill_ledger, make_ends
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    PEPPER,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
    make_tenant,
)

SERVER = Path(__file__).parents[3] / "server"
# Tables are known once their modules are imported, whichever other tests run.
for path in SERVER.glob("*/tables.py"):
    importlib.import_module(f"server.{path.parent.name}.tables")


@pytest.fixture(params=["sqlite", "postgresql"])
def unmigrated(request, tmp_path):
    """A database without tables."""
    is_sqlite = request.param == "sqlite"
    url = None if is_sqlite else request.getfixturevalue("make_postgres")("template1")
    database = Database(url, data_dir=tmp_path)
    yield database
    database.close()


def test_the_migrations_make_exactly_the_tables_of_the_code(database):
    with database.engine.connect() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_migrating_twice_changes_nothing(database):
    insert_holds(database, make_hold(make_price(database)))
    database.migrate()
    with database.engine.connect() as conn:
        assert conn.scalar(sa.text("SELECT count(*) FROM holds")) == 1


def test_downgrading_leaves_no_table_and_upgrading_brings_them_back(unmigrated):
    database = unmigrated
    database.migrate()
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "base")
        assert sa.inspect(conn).get_table_names() == ["alembic_version"]
    database.migrate()
    with database.engine.connect() as conn:
        assert set(metadata.tables) <= set(sa.inspect(conn).get_table_names())


def test_usage_of_an_older_release_gets_its_entries_in_its_order(unmigrated):
    database = unmigrated
    database.migrate("0002")
    with database.begin() as conn:
        conn.execute(
            sa.text(
                "INSERT INTO price_versions (price_version, effective_at_ms, prompt_nanousd, "
                "cached_nanousd, completion_nanousd, created_at_ms) VALUES (1, 0, 2, 1, 3, 0)"
            )
        )
        for event_id in (4, 5, 9):
            values = _OLD_EVENT | {"event_id": event_id, "request_id": f"r{event_id}"}
            values |= {"journal_seq": event_id, "ended_at_ms": NOW_MS - event_id}
            conn.execute(sa.insert(sa.table("usage_events", *map(sa.column, values))), values)
    database.migrate()
    adopt = 2
    while adopt:
        adopt = database.write_sync(lambda c: adopt_events(c, SIGNER, NOW_MS, limit=2))
    receipts = database.read_sync(lambda c: list(iterate_receipts(c, select_receipts())))
    assert [receipt["request_id"] for receipt in receipts] == ["r4", "r5", "r9"]
    assert [receipt["entry_id"] for receipt in receipts] == [10, 11, 12]
    assert {receipt["amount_nanousd"] for receipt in receipts} == {6 * 2 + 1 * 1 + 5 * 3}
    assert all(receipt["sha256"] == sha256_of(receipt) for receipt in receipts)
    database.write_sync(lambda c: post(c, SIGNER, "e1", [make_end(20, "new")], NOW_MS))
    assert database.write_sync(lambda c: adopt_events(c, SIGNER, NOW_MS)) == 0


_OLD_EVENT = {
    "engine_id": "e1",
    "tenant_id": "ten_1",
    "base_revision": "b" * 64,
    "prompt_tokens": 7,
    "cached_tokens": 1,
    "completion_tokens": 5,
    "finish_reason": "stop",
    "stop_cause": "eos",
    "output_sha256": "0" * 64,
    "price_version": 1,
    "amount_nanousd": 28,
    "started_at_ms": NOW_MS - 99,
    "posted_at_ms": NOW_MS,
}


def test_several_gateways_may_migrate_at_once(make_postgres, tmp_path):
    url = make_postgres("template1")
    databases = [Database(url, data_dir=tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(3) as gateways:
        for migrated in [gateways.submit(database.migrate) for database in databases]:
            migrated.result()
    for database in databases:
        database.close()


def test_a_migration_that_another_process_holds_up_is_an_error_not_a_hang(tmp_path, postgres_url):
    config = DatabaseConfig(migration_timeout_s=0.1)
    first = Database(data_dir=tmp_path, exclusive=False)
    second = Database(data_dir=tmp_path, exclusive=False, config=config)
    with first._migration_lock(), pytest.raises(MigrationLocked):
        second.migrate()
    second.migrate()
    first.close()
    second.close()


def test_what_an_older_release_knew_is_there_in_the_new_words(unmigrated):
    database = unmigrated
    database.migrate("0003")
    with database.begin() as conn:
        for table, rows in _OF_0003.items():
            for row in rows:
                conn.execute(sa.insert(sa.table(table, *map(sa.column, row))), row)
    database.migrate()
    with database.begin() as conn:
        scopes = {row.key_id: json.loads(row.scopes) for row in conn.execute(sa.select(api_keys))}
        spend = {(s.tenant_id, s.month): s.amount_nanousd for s in conn.execute(_ALL_SPEND)}
        is_granted = grants.is_granted(conn, "t1", "pirate", "t2")
        audited = dict(conn.execute(sa.select(audit_log.c.target, audit_log.c.tenant_id)).all())
    assert scopes == {
        "user": ["adapters:read", "adapters:write", "inference", "usage:read"],
        "boss": ["admin", "inference"],
    }
    # A payment does not count as spend; the correction lowers the month that it corrects.
    assert spend == {("t1", "2026-02"): 70, ("t1", "2026-01"): 5}
    assert audited == {"t1": "t1", "user": "t1"}
    assert is_granted, "nobody has to accept what was shared before there were offers"
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0003")
        keys = sa.table("api_keys", sa.column("key_id"), sa.column("scopes"))
        old = {row.key_id: json.loads(row.scopes) for row in conn.execute(sa.select(keys))}
    assert old == {"user": ["adapters", "inference", "usage"], "boss": ["inference", "keys"]}


_ALL_SPEND = sa.select(monthly_spend)
_KEY = {"tenant_id": "t1", "name": "", "hmac": "0" * 64, "prefix": "p", "created_at_ms": 0}
_ENTRY = {
    "tenant_id": "t1", "posted_at_ms": 0, "period": "2026-02", "prev_sha256": "0", "sha256": "0",
    "signing_key": "k", "signature": "s",
}  # fmt: skip
_FEBRUARY_MS, _JANUARY_MS = NOW_MS, NOW_MS - 20 * 86_400_000


def _entry(number, kind, debit, credit, amount, at_ms):
    return _ENTRY | {
        "entry_id": number, "receipt_seq": number, "kind": kind, "debit_account": debit,
        "credit_account": credit, "amount_nanousd": amount, "at_ms": at_ms,
    }  # fmt: skip


_OF_0003 = {
    "tenants": [
        {
            "tenant_id": "t1", "name": "acme", "status": "active", "weight": 1.0,
            "cache_salt": "s", "created_at_ms": 0,
        }
    ],
    "adapters": [{"adapter_id": "ad1", "tenant_id": "t1", "name": "pirate", "created_at_ms": 0}],
    "adapter_grants": [
        {
            "adapter_id": "ad1", "grantee_id": "t2", "tenant_id": "t1", "granted_at_ms": 0,
            "granted_by": "key:k",
        }
    ],
    "api_keys": [
        _KEY | {"key_id": "user", "scopes": '["adapters", "inference", "usage"]'},
        _KEY | {"key_id": "boss", "scopes": '["inference", "keys"]'},
    ],
    "entries": [
        _entry(1, "usage", "tenant/t1", "revenue/usage", 100, _FEBRUARY_MS),
        _entry(2, "correction", "revenue/usage", "tenant/t1", 30, _FEBRUARY_MS),
        _entry(3, "storage", "tenant/t1", "revenue/storage", 5, _JANUARY_MS),
        _entry(4, "payment", "cash/payment", "tenant/t1", 1000, _JANUARY_MS),
    ],
    "audit_log": [
        {"at_ms": 1, "actor": "operator", "action": "tenant.create", "target": "t1", "detail": ""},
        {"at_ms": 2, "actor": "operator", "action": "key.create", "target": "user", "detail": ""},
    ],
}  # fmt: skip


def test_what_failed_in_an_older_release_is_counted_apart(database):
    price = make_price(database)
    insert_holds(database, *(make_hold(price, f"r{number}") for number in (1, 2, 3)))
    broken = {"finish_reason": "error", "stop_cause": "engine_failure"}
    ends = [make_end(1, "r1"), make_end(2, "r2", **broken), make_end(3, "r3", **broken)]
    database.write_sync(lambda c: post(c, SIGNER, ENGINE, ends, NOW_MS))
    before = database.read_sync(lambda c: sum_entries(c, 0, 2 * NOW_MS))
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0004")
    database.migrate()
    assert database.read_sync(lambda c: sum_entries(c, 0, 2 * NOW_MS)) == before
    assert (before[0].num_requests, before[0].num_failed_requests) == (1, 2)


def test_sums_by_day_are_made_from_those_by_hour(database):
    fill_ledger(database, make_ends(24, seed=1))
    query = sa.select(usage_days).order_by(*usage_days.primary_key)
    before = database.read_sync(lambda c: c.execute(query).all())
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0018")
    database.migrate()
    after = database.read_sync(lambda c: c.execute(query).all())
    assert {row.dimension for row in before} == {"kind", "key", "model"}
    assert sorted(after) == sorted(before)


def test_keys_that_an_older_release_rotated_count_in_the_bucket_of_the_first(database):
    tenant = make_tenant(database)

    def make(conn):
        key, _ = create_key(conn, tenant.tenant_id, "", PEPPER, now_ms=NOW_MS)
        for _ in range(2):
            options = {"overlap_s": 9, "now_ms": NOW_MS}
            key, _ = rotate_key(conn, tenant.tenant_id, key.key_id, PEPPER, **options)

    database.write_sync(make)
    before = database.read_sync(lambda c: list_keys(c, tenant.tenant_id))
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0005")
    database.migrate()
    assert database.read_sync(lambda c: list_keys(c, tenant.tenant_id)) == before
    assert len({key.bucket_id for key in before}) == 1


def test_without_prices_by_base_model_no_price_becomes_everybodys(unmigrated):
    database = unmigrated
    database.migrate()
    general = make_price(database)
    insert_holds(database, make_hold(general, base_model="small"))
    database.write_sync(
        lambda c: add_price(
            c, DEFAULT_PRICES, base_model="small", effective_at_ms=NOW_MS, now_ms=NOW_MS
        )
    )
    with database.engine.execution_options(chorale_writes=True).begin() as conn:
        alembic.command.downgrade(migration_config(conn), "0013")
        defaults = "SELECT price_version FROM price_versions WHERE scope = 'default'"
        assert conn.execute(sa.text(defaults)).all() == [(general.price_version,)]
    database.migrate()
    found = database.read_sync(lambda c: price_for(c, NOW_MS, base_model="small"))
    assert found.price_version == general.price_version
    assert database.read_sync(lambda c: get_hold(c, "r1")).base_model == ""
