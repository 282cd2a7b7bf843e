"""Each day of storage and pins is posted once, when it is over; residency is posted as well."""

import asyncio
from functools import partial

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.wire.records import ResidencyItem, ResidencyRecord
from registry.tables import adapter_pins, adapter_versions
from server.billing import ledger, storage_charges
from server.billing.prices import DEFAULT_PRICES, add_price
from server.billing.rating import Prices
from server.billing.receipts.receipt import sha256_of
from server.billing.storage_charges import STORAGE, Kept
from server.billing.tables import kept_events
from server.text.times import DAY_MS
from tests.registry.rows import add_version
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    Clock,
    insert_holds,
    make_end,
    make_hold,
    make_price,
    post_ends,
    receipts_of,
)

DAY = NOW_MS // DAY_MS
"""First day that is posted."""
START = DAY * DAY_MS
HOUR_MS = 3_600_000
GB = 10**9


@pytest.fixture
def clock():
    return Clock(START + 12 * HOUR_MS)


def make_keeper(database, clock, **options):
    return Kept(database, SIGNER, now_ms=lambda _: clock.now, **options)


def turn(database, clock):
    """Run a turn; return the number of entries that it posted."""
    return asyncio.run(make_keeper(database, clock).turn())


def begin(database, clock):
    make_price(database)
    assert turn(database, clock) == 0


def store(database, name="pirate", tenant_id="ten_1", *, start=0, end=None, digest=None):
    """Insert a version of 1 GB that existed from `start` until `end`, in hours after START."""

    def write(conn):
        adapter_id = add_version(conn, tenant_id, name, size_bytes=GB)
        values = {"created_at_ms": START + start * HOUR_MS}
        values |= {} if digest is None else {"digest": digest}
        if end is not None:
            values |= {"state": "deleted", "deleted_at_ms": START + end * HOUR_MS}
        is_it = adapter_versions.c.adapter_id == adapter_id
        conn.execute(sa.update(adapter_versions).where(is_it).values(**values))
        return adapter_id

    return database.write_sync(write)


def pin(database, pin_id, adapter_id, start, end=None, size_bytes=GB):
    values = {
        "pin_id": pin_id,
        "adapter_id": adapter_id,
        "version": 1,
        "tenant_id": "ten_1",
        "size_bytes": size_bytes,
        "pinned_at_ms": START + int(start * HOUR_MS),
        "unpinned_at_ms": None if end is None else START + int(end * HOUR_MS),
        "pinned_by": "key1",
    }
    database.write_sync(lambda c: c.execute(sa.insert(adapter_pins).values(**values)))


def hours_of(database):
    """{(kind, day after the first): hours} of all kept events."""
    found = {}
    for row in database.read_sync(lambda c: c.execute(sa.select(kept_events)).all()):
        day = (row.started_at_ms - START) // DAY_MS
        kind = {"store": "storage", "device": "pinned"}[row.tier]
        found[kind, day] = found.get((kind, day), 0) + row.duration_ms / HOUR_MS
    return found


def test_a_day_is_posted_once_when_it_is_over(each_database, clock):
    store(each_database, start=-100)
    begin(each_database, clock)
    assert turn(each_database, clock) == 0
    clock.now = START + DAY_MS + 59_999  # the day's last changes may not be committed yet
    assert turn(each_database, clock) == 0
    clock.now += 1
    assert turn(each_database, clock) == 1
    assert turn(each_database, clock) == 0
    [receipt] = receipts_of(each_database)
    assert (receipt["kind"], receipt["tier"], receipt["size_bytes"]) == ("storage", "store", GB)
    assert receipt["duration_ms"] == DAY_MS
    assert receipt["amount_nanousd"] == 24 * DEFAULT_PRICES.storage_nanousd
    # The entry is dated in the day and month in which the adapter was stored.
    assert receipt["ended_at"] == "2026-02-02T23:59:59.999Z"
    assert sha256_of(receipt) == receipt["sha256"]


def test_a_gateway_that_was_away_posts_every_day_it_missed(each_database, clock):
    adapter_id = store(each_database, start=-1, end=60)
    pin(each_database, "p1", adapter_id, 6, 30)
    begin(each_database, clock)
    clock.now += 4 * DAY_MS
    turn(each_database, clock)
    assert hours_of(each_database) == {
        ("storage", 0): 24, ("storage", 1): 24, ("storage", 2): 12,
        ("pinned", 0): 18, ("pinned", 1): 6,
    }  # fmt: skip
    assert each_database.read_sync(storage_charges.posted_until_ms) == START + 4 * DAY_MS


def test_equal_adapters_of_one_tenant_are_stored_once(sqlite_database, clock):
    database, same = sqlite_database, "d" * 64
    first = store(database, "a", start=1, end=3, digest=same)
    store(database, "b", start=2, end=5, digest=same)
    store(database, "c", start=8, end=9, digest=same)
    store(database, "a", "ten_2", start=0, end=1, digest=same)
    begin(database, clock)
    clock.now += DAY_MS
    assert turn(database, clock) == 2
    mine, others = receipts_of(database)
    assert mine["duration_ms"] == 5 * HOUR_MS
    assert (mine["adapter_id"], mine["started_at"][11:16]) == (first, "01:00")
    assert others["duration_ms"] == HOUR_MS


def test_what_was_deleted_before_the_day_is_not_in_it(sqlite_database, clock):
    database = sqlite_database
    adapter_id = store(database, start=-9, end=-1)
    pin(database, "p1", adapter_id, -9, -1)
    pin(database, "p2", adapter_id, 3, 3)  # pinned for 0 hours
    begin(database, clock)
    clock.now += 2 * DAY_MS
    assert turn(database, clock) == 0


def test_a_turn_that_was_cut_off_is_taken_up_by_the_next(sqlite_database, clock):
    database = sqlite_database
    for number in range(5):
        adapter_id = store(database, f"a{number}", start=0)
        pin(database, f"p{number}", adapter_id, 1)
    begin(database, clock)
    clock.now += DAY_MS
    keeper = make_keeper(database, clock, page_size=2)
    posted, place = database.write_sync(partial(keeper.post_page, STORAGE, (0, "")))
    assert (posted, place[0]) == (2, DAY)
    assert asyncio.run(keeper.turn()) == 3 + 5
    assert turn(database, clock) == 0
    # A second keeper that began the same day finds it posted, and its place is of no other day.
    assert database.write_sync(partial(keeper.post_page, STORAGE, place)) == (0, None)
    clock.now += DAY_MS
    assert database.write_sync(partial(keeper.post_page, STORAGE, (DAY, "zz")))[0] == 2
    sources = database.read_sync(lambda c: c.execute(sa.select(kept_events.c.source_id)).all())
    assert len(set(sources)) == len(sources) == 12


def test_the_price_of_the_last_millisecond_counts(sqlite_database, clock):
    database = sqlite_database
    begin(database, clock)
    dear = Prices(**{name: 7 * GB for name in Prices.__dataclass_fields__})
    adapter_id = store(database, start=0)
    for scope_id, hour in ((adapter_id, 30), ("elsewhere", 0)):
        at_ms = START + hour * HOUR_MS
        database.write_sync(
            lambda c, scope_id=scope_id, at_ms=at_ms: add_price(
                c, dear, scope="adapter", scope_id=scope_id, effective_at_ms=at_ms, now_ms=0
            )
        )
    clock.now += 2 * DAY_MS
    turn(database, clock)
    amounts = [receipt["amount_nanousd"] for receipt in receipts_of(database)]
    assert amounts == [24 * DEFAULT_PRICES.storage_nanousd, 24 * 7 * GB]


lifetimes = st.lists(
    st.tuples(st.integers(-30, 100), st.none() | st.integers(0, 60)), min_size=1, max_size=5
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lifetimes=lifetimes)
def test_storage_is_the_union_of_lifetimes_hour_by_hour(sqlite_database, lifetimes):
    """The model asks for every hour of four days whether any version existed."""
    with sqlite_database.engine.execution_options(chorale_writes=True).connect() as conn:
        for number, (start, length) in enumerate(lifetimes):
            adapter_id = add_version(conn, "ten_1", f"a{number}", size_bytes=GB)
            values = {"digest": "d" * 64, "created_at_ms": START + start * HOUR_MS}
            if length is not None:
                values["deleted_at_ms"] = START + (start + length) * HOUR_MS
            is_it = adapter_versions.c.adapter_id == adapter_id
            conn.execute(sa.update(adapter_versions).where(is_it).values(**values))
        for day in range(4):
            stretches, _ = storage_charges.stored(conn, DAY + day, "", 9)
            there = sum(
                any(
                    start <= hour and (length is None or hour < start + length)
                    for start, length in lifetimes
                )
                for hour in range(24 * day, 24 * (day + 1))
            )
            assert sum(stretch.duration_ms for stretch in stretches) == there * HOUR_MS
        conn.rollback()


# ---- residency ----


def make_item(digest, tenant_id="ten_1", **fields):
    values = {
        "object_key": f"tenants/{tenant_id}/{digest}",
        "adapter_id": "up_1",
        "version": 0,
        "digest": digest,
        "tier": "device",
        "size_bytes": GB,
        "slabs": 3,
        "duration_ms": HOUR_MS,
        "is_pinned": False,
        **fields,
    }
    return ResidencyItem(**values)


def make_record(seq, *items):
    return ResidencyRecord(seq=seq, at=NOW_MS / 1000, started_at=NOW_MS / 1000 - 900, items=items)


def test_residency_has_a_price_on_the_device_and_only_unpinned(each_database):
    make_price(each_database)
    insert_holds(each_database, make_hold(make_price(each_database)))
    resident = {**{name: 0 for name in Prices.__dataclass_fields__}, "resident_nanousd": 5 * GB}
    each_database.write_sync(
        lambda c: add_price(c, Prices(**resident), effective_at_ms=NOW_MS, now_ms=NOW_MS)
    )
    adapter_id = store(each_database)
    digest = each_database.read_sync(lambda c: c.scalar(sa.select(adapter_versions.c.digest)))
    record = make_record(
        2,
        make_item(digest),
        make_item(digest, is_pinned=True),
        make_item(digest, tier="disk", slabs=0),
        make_item("f" * 64, "ten_2"),  # proved, but not of a version
    )
    for _ in range(2):  # a replay changes nothing
        post_ends(each_database, make_end(1), record)
    receipts = receipts_of(each_database)
    assert [receipt["kind"] for receipt in receipts] == ["usage", *["resident"] * 2]
    shown = [
        (r["adapter_id"], r["adapter_version"], r["tier"], r["slabs"], r["kept_nanousd"],
         r["amount_nanousd"])
        for r in receipts[1:]
    ]  # fmt: skip
    assert shown == [
        (adapter_id, 1, "device", 3, 5 * GB, 5 * GB),
        (None, None, "device", 3, 5 * GB, 5 * GB),
    ]
    for receipt in receipts:
        assert sha256_of(receipt) == receipt["sha256"]
    assert each_database.read_sync(lambda c: ledger.settled_seq(c, ENGINE)) == 2
    sources = sa.select(kept_events.c.source, kept_events.c.source_id)
    assert [tuple(row) for row in each_database.read_sync(lambda c: c.execute(sources).all())] == [
        (ENGINE, f"2/{index}") for index in (0, 3)
    ]


def test_residency_without_a_price_is_an_entry_a_day_whatever_is_posted_again(each_database, clock):
    begin(each_database, clock)
    stays = ((0, "device"), (5, "disk"), (23, "device"), (24, "device"), (7, "disk"))
    *records, late = (
        ResidencyRecord(
            seq=seq, at=START / 1000 + hour * 3600, started_at=0, items=(make_item("a", tier=tier),)
        )
        for seq, (hour, tier) in enumerate(stays, 1)
    )
    for days, groups in ((0, (records[:2], records, records[1:])), (1, ()), (0, ([late],))):
        for group in groups:
            post_ends(each_database, *group, now_ms=0)
        clock.now += days * DAY_MS
        turn(each_database, clock)
    kept = [(r["tier"], r["duration_ms"], r["kept_nanousd"]) for r in receipts_of(each_database)]
    assert sorted(kept) == [("device", 2 * HOUR_MS, 0), *[("disk", HOUR_MS, None)] * 2]
