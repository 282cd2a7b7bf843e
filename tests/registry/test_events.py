import pytest
from sqlalchemy import insert, select

from registry.catalog.events import (
    KEPT_MS,
    MAX_READ,
    EventTail,
    newest_event_id,
    prune_events,
    record_event,
)
from registry.tables import adapter_events

A = "tenant-a"


def record(conn, at_ms=0, version=None):
    record_event(conn, "moved", A, "ad_1", version, at_ms)


def insert_with(conn, event_id):
    place = {"at_ms": 0, "kind": "moved", "tenant_id": A, "adapter_id": "ad_1"}
    conn.execute(insert(adapter_events).values(event_id=event_id, version=event_id, **place))


def read(tail, conn, now_ms=0):
    """Read events and mark them as taken, as a gateway does; return their versions."""
    events = tail.read(conn)
    tail.take(events, now_ms)
    return [event.version for event in events]


def test_every_event_is_read_once_in_order(connection):
    for version in (1, 2):
        record(connection, version=version)
    tail = EventTail(0)
    assert read(tail, connection) == [1, 2]
    record(connection, version=3)
    assert read(tail, connection) == [3]
    assert read(tail, connection) == []


def test_what_was_read_but_not_taken_is_read_again(connection):
    record(connection, version=1)
    tail = EventTail(0)
    assert tail.read(connection) == tail.read(connection) != []


def test_a_tail_begins_after_the_id_it_is_given(connection):
    assert newest_event_id(connection) == 0
    record(connection, version=1)
    tail = EventTail(newest_event_id(connection))
    record(connection, version=2)
    assert read(tail, connection) == [2]


def test_more_than_one_read_takes_are_read_one_after_the_other(connection):
    rows = [{"at_ms": 0, "kind": "moved", "tenant_id": A, "adapter_id": "ad_1", "version": number}
        for number in range(MAX_READ + 7)]  # fmt: skip
    connection.execute(insert(adapter_events), rows)
    tail = EventTail(0)
    found = read(tail, connection) + read(tail, connection)
    assert found == list(range(MAX_READ + 7))
    assert read(tail, connection) == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_event_that_commits_after_a_later_one_is_not_lost(database):
    tail = EventTail(0)
    with database.connect() as slow, database.connect() as reader:
        reader = reader.execution_options(isolation_level="AUTOCOMMIT")
        record(slow, version=1)
        with database.begin() as fast:
            record(fast, version=2)
        assert read(tail, reader) == [2]
        slow.commit()
        assert read(tail, reader) == [1]
        assert read(tail, reader) == []


def test_what_was_rolled_back_is_not_asked_for_for_ever(connection):
    tail = EventTail(0)
    insert_with(connection, 4)
    assert read(tail, connection, now_ms=0) == [4]
    insert_with(connection, 2)
    assert read(tail, connection, now_ms=30_000) == [2]
    assert read(tail, connection, now_ms=30_001) == []
    insert_with(connection, 3)  # a minute late, which no transaction is
    assert read(tail, connection, now_ms=60_000) == []


def test_a_tail_remembers_only_so_many_holes(connection):
    record(connection)
    tail = EventTail(0)
    read(tail, connection)
    insert_with(connection, 10**9)
    read(tail, connection)
    assert tail.after_id == 10**9
    assert read(tail, connection) == []  # a query for a billion holes would not end


def test_events_are_kept_for_an_hour(connection):
    for at_ms in (0, 1, 2):
        record(connection, at_ms=at_ms)
    prune_events(connection, KEPT_MS + 1)
    assert connection.execute(select(adapter_events.c.at_ms)).scalars().all() == [1, 2]
