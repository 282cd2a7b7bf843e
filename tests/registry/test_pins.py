import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select, update
from sqlalchemy.pool import StaticPool

from registry.catalog import adapter_rows, pins
from registry.errors import QuotaExceeded
from registry.tables import (
    adapter_aliases,
    adapter_events,
    adapter_pins,
    adapter_versions,
    audit_log,
    metadata,
)
from tests.registry.rows import add_version

A, B = "tenant-a", "tenant-b"
BASE = "b" * 64


def adapter(connection, name="pirate", tenant_id=A):
    return adapter_rows.find_adapter(connection, tenant_id, name)


def pin(connection, name="pirate", now_ms=5, tenant_id=A):
    found = adapter(connection, name, tenant_id)
    return pins.pin_adapter(connection, found, actor="key:k1", now_ms=now_ms)


def unpin(connection, name="pirate", now_ms=9):
    pins.unpin_adapter(connection, adapter(connection, name), actor="key:k1", now_ms=now_ms)


def intervals(connection):
    """(version, start, end) of every pin, in order."""
    columns = adapter_pins.c.version, adapter_pins.c.pinned_at_ms, adapter_pins.c.unpinned_at_ms
    query = select(*columns).order_by(adapter_pins.c.pinned_at_ms, adapter_pins.c.version)
    return [tuple(row) for row in connection.execute(query)]


def kinds(connection):
    query = select(adapter_events.c.kind, adapter_events.c.version)
    return [tuple(row) for row in connection.execute(query.order_by(adapter_events.c.event_id))]


def test_a_pin_is_an_interval_of_what_latest_means(connection):
    add_version(connection, version=1)
    add_version(connection, version=2)
    assert pin(connection, now_ms=5).version == 2
    assert pin(connection, now_ms=6).pinned_at_ms == 5
    unpin(connection, now_ms=9)
    unpin(connection, now_ms=10)
    assert intervals(connection) == [(2, 5, 9)]
    assert kinds(connection) == [("pinned", 2), ("unpinned", 2)]
    actions = connection.execute(select(audit_log.c.action)).scalars().all()
    assert actions == ["adapter.pinned", "adapter.unpinned"]


def test_a_pin_weighs_what_the_canary_measured_on_the_device(connection):
    add_version(connection, name="measured", size_bytes=1000, device_bytes=3000)
    add_version(connection, name="older", size_bytes=1000)
    assert pin(connection, "measured").size_bytes == 3000
    assert pin(connection, "older").size_bytes == 1000
    assert pins.pinned_bytes(connection, A) == 4000


def test_a_pin_follows_latest(connection):
    add_version(connection, version=1, size_bytes=10)
    pin(connection, now_ms=5)
    add_version(connection, version=2, size_bytes=20)
    pins.follow_latest(connection, adapter(connection), 2, 7)
    pins.follow_latest(connection, adapter(connection), 2, 8)
    assert intervals(connection) == [(1, 5, 7), (2, 7, None)]
    assert pins.pinned_bytes(connection, A) == 20
    assert kinds(connection) == [("pinned", 1), ("unpinned", 1), ("pinned", 2)]


def test_a_clock_that_goes_back_makes_no_negative_interval(connection):
    add_version(connection)
    pin(connection, now_ms=5)
    unpin(connection, now_ms=3)
    assert intervals(connection) == [(1, 5, 5)]


def test_a_tenants_pinned_bytes_have_a_limit(connection):
    half = pins.MAX_PINNED_BYTES // 2
    for name, size_bytes in (("one", half), ("two", half), ("three", 1)):
        add_version(connection, name=name, size_bytes=size_bytes)
    add_version(connection, B, "theirs", size_bytes=half)
    pin(connection, "one")
    pin(connection, "theirs", tenant_id=B)
    pin(connection, "two")
    with pytest.raises(QuotaExceeded, match="unpin"):
        pin(connection, "three")
    unpin(connection, "one")
    assert pin(connection, "three").size_bytes == 1


def test_what_engines_keep_is_of_all_tenants_and_of_their_base_model(connection):
    add_version(connection, B, "second")
    add_version(connection, A, "first")
    add_version(connection, A, "other", base_revision="0" * 64)
    add_version(connection, A, "cold")
    pin(connection, "first", now_ms=1)
    pin(connection, "second", now_ms=2, tenant_id=B)
    pin(connection, "other", now_ms=3)
    wanted = [adapter(connection, "first"), adapter(connection, "second", B)]
    found = pins.pins_in_force(connection, BASE)
    assert found == [(each.latest.base, each.latest.ref) for each in wanted]
    connection.execute(adapter_versions.update().values(state="deleted"))
    assert pins.pins_in_force(connection, BASE) == []


# ---- any sequence of acts ----


@pytest.fixture(scope="module")
def three_versions():
    """A connection to an adapter of three versions, which a rollback restores."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    metadata.create_all(engine)
    with engine.connect() as conn:
        for version in (1, 2, 3):
            add_version(conn, version=version)
        conn.commit()
        yield conn
    engine.dispose()


acts = st.lists(st.tuples(st.sampled_from(["pin", "unpin", 1, 2, 3, None]), st.integers(1, 9)))


@settings(max_examples=40, deadline=None)
@given(acts)
def test_intervals_say_at_every_moment_which_version_was_pinned(three_versions, acts):
    """An act that is a number, or None, moves `latest` to that version, or removes it."""
    connection = three_versions
    connection.rollback()
    now_ms, is_pinned, latest = 0, False, 3
    expected, before = {}, []
    for act, pause_ms in acts:
        expected |= dict.fromkeys(range(now_ms, now_ms + pause_ms), is_pinned and latest)
        now_ms += pause_ms
        if act == "pin":
            is_pinned = latest is not None
            if is_pinned:
                pin(connection, now_ms=now_ms)
        elif act == "unpin":
            is_pinned = False
            unpin(connection, now_ms=now_ms)
        else:
            latest, is_pinned = act, is_pinned and act is not None
            connection.execute(update(adapter_aliases).values(version=act or 1))
            pins.follow_latest(connection, adapter(connection), act, now_ms)
        rows = {row["pin_id"]: row for row in connection.execute(select(adapter_pins)).mappings()}
        assert_only_ends_were_written(before, rows)
        before = list(rows.values())
    for moment, version in expected.items():
        covering = [
            number
            for number, start, end in intervals(connection)
            if start <= moment < (now_ms if end is None else end)
        ]
        assert covering == ([version] if version else [])


def assert_only_ends_were_written(before, after):
    for row in before:
        later = after[row["pin_id"]]
        assert {**later, "unpinned_at_ms": row["unpinned_at_ms"]} == dict(row)
        assert row["unpinned_at_ms"] in (None, later["unpinned_at_ms"])
