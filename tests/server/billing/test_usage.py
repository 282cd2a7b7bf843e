"""Sums of usage equal those of all entries added up, for any time, group and filter."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.messages import PROOF_TENANT
from registry.errors import Fault
from server.api.errors import answer_of
from server.api.times import parse_range
from server.billing import ledger, usage
from server.billing.prices import DEFAULT_PRICES, add_price
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.tables import entries, tenant_accounts, usage_days, usage_rollups
from server.billing.usage import WIDTH_MS, Selection, UsageSum, sum_entries
from server.text.times import HOUR_MS, rfc3339
from tests.server.export_ledger import give, keep, use_each
from tests.server.factories import NOW_MS, SIGNER

BEGIN_MS = NOW_MS - NOW_MS % WIDTH_MS["day"]
TENANTS = ("ten_1", "ten_2", "ten_3")
KEYS = ("key1", "key2", "key3")
MODELS = ("base", "pirate", "pirate@3", "pirate@beta", "pirates", "owner/pirate", "%")
DIGESTS = (None, "c" * 64, "d" * 64)
KINDS = ("usage", "storage", "pinned", "resident", "credit", "payment", "correction")
# Beginnings of hours, and moments right beside them.
MOMENTS = sorted(
    BEGIN_MS + hour * HOUR_MS + beside
    for hour in (0, 1, 2, 3, 23, 24, 25, 48)
    for beside in (-1, 0, 1, 59_999, 60_000, HOUR_MS // 2)
)
PRICES = replace(DEFAULT_PRICES, resident_nanousd=5 * 10**8)


def fill(database, seed=7):
    """Post entries of all kinds: free, reversed, kept and paid."""
    chance = random.Random(seed)
    database.write_sync(lambda c: add_price(c, PRICES, effective_at_ms=NOW_MS, now_ms=NOW_MS))

    def make_request():
        prompt = chance.randrange(1, 50)
        return {
            "tenant_id": chance.choice(TENANTS),
            "model": chance.choice(MODELS),
            "key_id": chance.choice(KEYS),
            "at_ms": chance.choice(MOMENTS),
            "adapter_digest": chance.choice(DIGESTS),
            "num_prompt_tokens": prompt,
            "num_cached_tokens": chance.randrange(prompt + 1),
            "num_completion_tokens": chance.randrange(50),
            "finish_reason": chance.choice(["stop", "length", "error"]),
        }

    request_ids = []
    for _ in range(6):
        request_ids += use_each(database, *(make_request() for _ in range(20)))
        for kind in ("storage", "pinned", "resident"):
            keep(
                database, chance.choice(TENANTS), chance.choice(MOMENTS), kind=kind,
                size_bytes=chance.randrange(10**13), duration_ms=chance.randrange(9 * 10**7),
                adapter_digest=chance.choice(DIGESTS[1:]),
            )  # fmt: skip
        for kind in ("credit", "payment"):
            give(database, kind, chance.choice(TENANTS), at_ms=chance.choice(MOMENTS))
    for request_id in chance.sample(request_ids, 15):
        at_ms = chance.choice(MOMENTS)
        database.write_sync(lambda c, r=request_id, at=at_ms: ledger.mark_failed(c, SIGNER, r, at))


def read_entries(database):
    """Every receipt with its time, (at_ms, receipt)."""
    receipts = database.read_sync(lambda c: list(iterate_receipts(c, select_receipts())))
    query = sa.select(entries.c.entry_id, entries.c.at_ms)
    moments = dict(database.read_sync(lambda c: [tuple(row) for row in c.execute(query)]))
    return [(moments[receipt["entry_id"]], receipt) for receipt in receipts]


def is_which(receipt, only):
    model = receipt["model"] or ""
    return (
        (only.tenant_ids is None or receipt["tenant_id"] in only.tenant_ids)
        and (only.key_ids is None or receipt["key_id"] in only.key_ids)
        and (only.kinds is None or receipt["kind"] in only.kinds)
        and (
            only.models is None
            or model in only.models
            or any(model.startswith(f"{name}@") for name in only.models)
        )
    )


def add_up(posted, start_ms, end_ms, group_by, only):
    """The same sums, by plain addition."""
    groups = defaultdict(lambda: defaultdict(int))
    if not group_by:
        groups[()] = defaultdict(int)
    for at_ms, receipt in posted:
        if not (start_ms <= at_ms < end_ms and is_which(receipt, only)):
            continue
        values = {
            "tenant": receipt["tenant_id"],
            "model": receipt["model"],
            "key": receipt["key_id"],
            "adapter_digest": receipt["adapter_digest"],
            "kind": receipt["kind"],
        }
        values |= {name: at_ms - at_ms % width for name, width in WIDTH_MS.items()}
        total = groups[tuple(values[name] for name in group_by)]
        total["amount_nanousd"] += receipt["amount_nanousd"]
        if receipt["kind"] == "usage":
            total["num_failed_requests" if receipt["is_failed"] else "num_requests"] += 1
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
                total[name] += receipt[name]
            if receipt["amount_nanousd"]:
                for part in ("cached", "completion"):
                    amount = receipt[f"{part}_tokens"] * receipt[f"{part}_nanousd"]
                    total[f"{part}_amount_nanousd"] += amount
        elif receipt["duration_ms"] is not None:
            total["kept_mb_s"] += receipt["size_bytes"] * receipt["duration_ms"] // 10**9
    names = ["at_ms" if name in WIDTH_MS else name for name in group_by]
    found = [
        UsageSum(**total, **dict(zip(names, group, strict=True))) for group, total in groups.items()
    ]
    return sorted(found, key=lambda total: tuple(getattr(total, name) or "" for name in names))


def sums(database, tenant_id, group_by=(), start_ms=0, end_ms=2**62):
    only = Selection(tenant_ids=None if tenant_id is None else [tenant_id])
    return database.read_sync(lambda c: sum_entries(c, start_ms, end_ms, group_by, only))


def some_of(values):
    return st.none() | st.lists(st.sampled_from(values), max_size=3)


moments = st.sampled_from(MOMENTS) | st.integers(MOMENTS[0] - HOUR_MS, MOMENTS[-1] + HOUR_MS)
dimensions = st.tuples(
    st.lists(st.sampled_from(["tenant", "model", "key", "adapter_digest", "kind"]), max_size=5),
    st.lists(st.sampled_from(["day", "hour", "minute"]), max_size=1),
).map(lambda both: (*both[1], *both[0]))
whiches = st.builds(
    Selection,
    tenant_ids=some_of((*TENANTS, "ten_9")),
    key_ids=some_of(KEYS),
    models=some_of((*MODELS, "Pirate", "p_rate")),
    kinds=some_of(KINDS) | st.just(SPEND_KINDS),
)
# Most of these ranges have a whole day, and most of them parts of others.
DAY_MS = WIDTH_MS["day"]
starts = st.sampled_from([at for at in MOMENTS if at <= BEGIN_MS + DAY_MS])
ends = st.sampled_from([at for at in MOMENTS if at > BEGIN_MS + 2 * DAY_MS - HOUR_MS])
units = st.sampled_from([(), ("day",), ("tenant",), ("tenant", "day")])


def of_days(dimension):
    """Selections that the sums by day have, of one dimension."""
    tenant_ids = some_of(TENANTS)
    if dimension == "kind":
        return st.builds(Selection, tenant_ids=tenant_ids, kinds=some_of(KINDS))
    names = {"model": {"models": some_of((*MODELS, "p_rate"))}, "key": {"key_ids": some_of(KEYS)}}
    return st.builds(
        Selection, tenant_ids=tenant_ids, kinds=st.just(SPEND_KINDS), **names[dimension]
    )


def test_any_sum_is_what_adding_up_its_entries_gives(each_database):
    fill(each_database)
    posted = read_entries(each_database)
    assert {receipt["kind"] for _, receipt in posted} == set(KINDS)

    @settings(max_examples=60 if each_database.is_sqlite else 20, deadline=None, database=None)
    @given(moments, moments, dimensions, whiches)
    def check(start_ms, end_ms, group_by, only):
        found = each_database.read_sync(lambda c: sum_entries(c, start_ms, end_ms, group_by, only))
        assert found == add_up(posted, start_ms, end_ms, group_by, only)

    check()


def test_a_sum_by_day_and_one_dimension_is_what_adding_up_its_entries_gives(each_database):
    fill(each_database)
    posted = read_entries(each_database)

    @settings(max_examples=60 if each_database.is_sqlite else 20, deadline=None, database=None)
    @given(starts, ends, units, st.sampled_from(["model", "key", "kind"]), st.data())
    def check(start_ms, end_ms, units, dimension, data):
        only = data.draw(of_days(dimension))
        group_by = (*units, dimension) if data.draw(st.booleans()) else units
        assert usage._day_dimension(group_by, only) in (dimension, "kind")
        found = each_database.read_sync(lambda c: sum_entries(c, start_ms, end_ms, group_by, only))
        assert found == add_up(posted, start_ms, end_ms, group_by, only)

    check()


def test_too_many_groups_are_refused_not_cut_off(database, monkeypatch):
    monkeypatch.setattr(usage, "MAX_GROUPS", 2)
    use_each(database, {"model": "a"}, {"model": "b"}, {"model": "c"})
    with pytest.raises(Fault) as caught:
        sums(database, "ten_1", ("model",))
    assert (answer_of(caught.value).status, caught.value.param) == (400, "group_by")


def test_a_time_may_be_larger_than_any_column(each_database):
    use_each(each_database, {})
    assert sums(each_database, "ten_1", (), -(2**70), 2**70)[0].num_requests == 1


@pytest.mark.parametrize("tenant_id", ["ten_1", None])
@pytest.mark.parametrize("unit", ["day", "hour", "minute"])
def test_a_sum_of_some_time_does_not_read_the_whole_ledger(each_database, tenant_id, unit):
    insert_month(each_database)
    plan = explain(each_database, tenant_id, unit)
    tables = ("entries", "usage_rollups", "usage_days")
    scans = [scan + name for name in tables for scan in ("SCAN ", "Seq Scan on ")]
    assert not [line for line in plan if any(scan in line for scan in scans)]
    assert any("ix_entries_tenant_at" in line for line in plan)
    assert any("usage_rollups" in line for line in plan) == (unit != "minute")
    assert any("usage_days" in line for line in plan) == (unit == "day")


def insert_month(database, num_tenants=20):
    """Insert an entry and a sum per hour and tenant, so many that query planners use indexes."""
    entry = dict.fromkeys((column.name for column in entries.c), "x") | {
        "kind": "usage", "amount_nanousd": 1, "posted_at_ms": NOW_MS, "price_version": None,
        "reverses_entry_id": None, "idempotency_key": None, "period": "2026-02",
    }  # fmt: skip
    total = dict.fromkeys((column.name for column in usage_rollups.c), 0)
    total |= {"kind": "usage", "key_id": "", "model": "", "adapter_digest": ""}
    rows = [
        {
            "entry_id": i, "receipt_seq": i, "tenant_id": f"ten_{i % num_tenants}",
            "at_ms": BEGIN_MS + i // num_tenants * HOUR_MS,
        }
        for i in range(num_tenants * 240)
    ]  # fmt: skip
    sums = [{"tenant_id": row["tenant_id"], "hour_ms": row["at_ms"]} for row in rows]
    day = dict.fromkeys((column.name for column in usage_days.c), 0) | {"dimension": "kind"}
    days = [
        {"tenant_id": f"ten_{i}", "day_ms": BEGIN_MS + number * WIDTH_MS["day"], "name": kind}
        for i in range(num_tenants)
        for number in range(100)
        for kind in ("usage", "storage")
    ]
    accounts = [
        {"tenant_id": f"ten_{i}", "balance_nanousd": 0, "receipt_seq": 0, "receipt_sha256": ""}
        for i in range(num_tenants)
    ]

    def write(conn):
        conn.execute(sa.insert(entries), [entry | row for row in rows])
        conn.execute(sa.insert(usage_rollups), [total | row for row in sums])
        conn.execute(sa.insert(usage_days), [day | row for row in days])
        conn.execute(sa.insert(tenant_accounts), accounts)
        for table in (entries, usage_rollups, usage_days, tenant_accounts):
            conn.exec_driver_sql(f"ANALYZE {table.name}")

    database.write_sync(write)


def explain(database, tenant_id, unit):
    """Lines of the database's query plan for the sum of some days or hours."""
    plan = []

    def note(conn, cursor, statement, parameters, context, executemany):
        prefix = "EXPLAIN QUERY PLAN " if database.is_sqlite else "EXPLAIN "
        cursor.execute(prefix + statement, parameters)
        plan.extend(str(row[-1]).strip() for row in cursor.fetchall())

    def read(conn):
        sa.event.listen(conn, "before_cursor_execute", note)
        only = Selection(tenant_ids=None if tenant_id is None else [tenant_id])
        start_ms = BEGIN_MS + 5 * HOUR_MS - 7
        end_ms = start_ms + 3 * WIDTH_MS["day" if unit == "day" else "hour"]
        sum_entries(conn, start_ms, end_ms, (unit,), only)

    database.read_sync(read)
    return plan


@given(st.integers(0, 4 * 10**12))
def test_a_time_that_a_receipt_states_is_read_to_its_millisecond(at_ms):
    assert parse_range(rfc3339(at_ms), "9999-12-31")[0] == at_ms


@pytest.mark.parametrize("grain", ["minute", "hour", "day"])
def test_a_proof_is_no_tenants_usage_whatever_the_sums_are_read_from(database, grain):
    use_each(database, {"at_ms": BEGIN_MS}, {"at_ms": BEGIN_MS, "tenant_id": PROOF_TENANT})
    rows = database.read_sync(
        lambda c: sum_entries(c, BEGIN_MS, BEGIN_MS + WIDTH_MS["day"], ["tenant", grain])
    )
    assert [row.tenant for row in rows] == ["ten_1"]
