import asyncio
import itertools
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from registry.catalog.audit import record_audit
from registry.errors import Conflict
from registry.tables import audit_log
from server.accounts.tenants import create_tenant, list_tenants
from server.billing.tables import monthly_spend
from server.database.config import DatabaseConfig
from server.database.database import (
    DEFAULT_FILE,
    Database,
    DatabaseInUse,
    LedgerUnavailable,
    UnsupportedDatabase,
)
from server.database.pages import pages
from tests.server.factories import NOW_MS


def note(target):
    return lambda conn: record_audit(conn, None, "b", target=target, at_ms=NOW_MS, actor="a")


def targets(conn):
    return list(conn.scalars(sa.select(audit_log.c.target).order_by(audit_log.c.audit_id)))


def block_writer(database):
    """Hold the writer thread in a write until the returned event is set."""
    started, release = threading.Event(), threading.Event()

    def wait(_conn):
        started.set()
        release.wait()

    future = database.submit(wait)
    started.wait()
    return future, release


@pytest.mark.parametrize("mode", [None, 0o644])
def test_nobody_else_may_read_the_files_of_the_database(tmp_path, mode):
    path = tmp_path / DEFAULT_FILE
    if mode is not None:  # as an older release left it, with what a killed gateway had not merged
        for suffix in ("", "-wal", "-shm"):
            (tmp_path / f"{DEFAULT_FILE}{suffix}").touch(mode)
    before = os.umask(0)
    try:
        database = Database(data_dir=tmp_path)
        assert {mode_of(file) for file in tmp_path.glob("chorale*")} == {0o600}
        database.migrate()
    finally:
        os.umask(before)
    files = {file.name: mode_of(file) for file in tmp_path.glob("chorale*")}
    database.close()
    assert files == dict.fromkeys((path.name, f"{path.name}-wal", f"{path.name}-shm"), 0o600)


def mode_of(file):
    return stat.S_IMODE(file.stat().st_mode)


def test_queued_writes_are_one_commit_in_order(each_database):
    commits = []
    sa.event.listen(each_database.engine, "commit", lambda conn: commits.append(conn))
    first, release = block_writer(each_database)
    writes = [each_database.submit(note(f"{i}")) for i in range(7)]
    release.set()
    for write in [first, *writes]:
        write.result()
    assert each_database.read_sync(targets) == [f"{i}" for i in range(7)]
    assert len(commits) == 2


def test_a_failing_write_undoes_itself_and_not_its_neighbours(each_database):
    def fail(conn):
        note("undone")(conn)
        raise ValueError("mine")

    _, release = block_writer(each_database)
    before, failing = each_database.submit(note("before")), each_database.submit(fail)
    after = each_database.submit(note("after"))
    release.set()
    before.result()
    after.result()
    with pytest.raises(ValueError, match="mine"):
        failing.result()
    assert each_database.read_sync(targets) == ["before", "after"]


def test_a_broken_constraint_fails_only_the_write_that_broke_it(each_database):
    _, release = block_writer(each_database)
    same = [
        each_database.submit(lambda c: create_tenant(c, "acme", now_ms=NOW_MS)) for _ in range(2)
    ]
    broken = each_database.submit(note(None))
    misspelled = each_database.submit(lambda c: c.execute(sa.text("INSRT INTO tenants")))
    release.set()
    same[0].result()
    with pytest.raises(Conflict):
        same[1].result()
    with pytest.raises(sa.exc.IntegrityError):
        broken.result()
    with pytest.raises(sa.exc.DBAPIError):
        misspelled.result()
    assert [tenant.name for tenant in each_database.read_sync(list_tenants)] == ["acme"]


def test_a_read_cannot_write(each_database):
    with pytest.raises((sa.exc.DBAPIError, LedgerUnavailable)):
        each_database.read_sync(note("sneaked in"))
    assert each_database.read_sync(targets) == []
    each_database.write_sync(note("allowed"))


@pytest.mark.parametrize("key", [("tenant_id", "month"), ("amount_nanousd",)])
def test_pages_have_every_row_once_in_the_order_of_their_key(each_database, key):
    rows = [
        {"tenant_id": tenant_id, "month": month, "amount_nanousd": number}
        for number, (tenant_id, month) in enumerate(
            itertools.product("abc", ("2026-01", "2026-02"))
        )
    ]
    each_database.write_sync(lambda c: c.execute(sa.insert(monthly_spend), rows[::-1]))
    columns, query = [monthly_spend.c[name] for name in key], sa.select(monthly_spend)
    for size in (2, 4, 7):
        found = each_database.read_sync(lambda c: list(pages(c, query, *columns, size=size)))  # noqa: B023
        assert [len(page) for page in found[:-1]] == [size] * (len(found) - 1)
        assert [dict(row) for page in found for row in page] == rows


def test_a_full_queue_refuses_at_once(database_url, tmp_path):
    config = DatabaseConfig(max_queued_writes=3)
    database = Database(database_url, data_dir=tmp_path, config=config)
    _, release = block_writer(database)
    writes = [database.submit(note("kept")) for _ in range(3)]
    with pytest.raises(LedgerUnavailable, match="3 writes wait already"):
        asyncio.run(database.write(note("refused")))
    release.set()
    for write in writes:
        write.result()
    assert database.read_sync(targets) == ["kept"] * 3
    database.close()


async def test_what_waited_too_long_for_its_turn_is_refused_and_not_done(sqlite_database, tmp_path):
    now_s = [0.0]
    config = DatabaseConfig(read_threads=1, queue_timeout_s=5.0)
    database = Database(data_dir=tmp_path, exclusive=False, config=config, clock=lambda: now_s[0])
    first, release = block_writer(database)
    asking = [
        asyncio.create_task(ask)
        for ask in (
            database.read(lambda _: first.result()),
            database.read(lambda _: pytest.fail("late reads are not done")),
            database.write(note("late")),
        )
    ]
    await asyncio.sleep(0)
    now_s[0] = 5.1
    release.set()
    _, *late = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in late] == [LedgerUnavailable] * 2
    assert database.read_sync(targets) == []
    database.write_sync(note("in time"))
    database.close()


async def test_reads_in_flight_have_a_bound(sqlite_database, tmp_path):
    config = DatabaseConfig(max_queued_reads=1)
    database = Database(data_dir=tmp_path, exclusive=False, config=config)
    release = threading.Event()
    held = asyncio.create_task(database.read(lambda _: release.wait()))
    await asyncio.sleep(0)
    with pytest.raises(LedgerUnavailable):
        await database.read(targets)
    release.set()
    await held
    assert await database.read(targets) == []
    database.close()


async def test_a_caller_that_leaves_before_its_turn_writes_nothing(each_database):
    _, release = block_writer(each_database)
    leaving = asyncio.create_task(each_database.write(note("left")))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    release.set()
    await each_database.write(note("stayed"))
    assert await each_database.read(targets) == ["stayed"]


def test_closing_finishes_what_is_queued_and_refuses_what_comes_after(database_url, tmp_path):
    database = Database(database_url, data_dir=tmp_path)
    _, release = block_writer(database)
    write = database.submit(note("queued"))
    closing = threading.Thread(target=database.close)
    closing.start()
    release.set()
    closing.join()
    write.result()
    with pytest.raises(LedgerUnavailable, match="closed"):
        database.write_sync(note("late"))
    with pytest.raises(LedgerUnavailable, match="closed"):
        asyncio.run(database.read(targets))
    database.close()


def test_a_second_gateway_on_the_same_sqlite_file_is_refused(sqlite_database, tmp_path):
    url = str(sqlite_database.url)
    with pytest.raises(DatabaseInUse, match="SQLite serves exactly one gateway"):
        Database(url, data_dir=tmp_path / "elsewhere")
    tool = Database(url, data_dir=tmp_path, exclusive=False)
    tool.write_sync(note("from the command line"))
    tool.close()
    sqlite_database.close()
    Database(url, data_dir=tmp_path).close()


def test_a_sqlite_file_that_another_process_holds_is_unavailable_not_a_hang(
    sqlite_database, tmp_path
):
    config = DatabaseConfig(busy_timeout_s=0.05)
    database = Database(data_dir=tmp_path, exclusive=False, config=config)
    other = sqlite3.connect(str(sqlite_database.url.database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [database.submit(note(f"{i}")) for i in range(3)]
    for write in writes:
        with pytest.raises(LedgerUnavailable, match="locked"):
            write.result()
    other.rollback()
    other.close()
    database.write_sync(note("again"))
    assert database.read_sync(targets) == ["again"]
    database.close()


def test_sqlite_commits_survive_a_power_cut(sqlite_database):
    def pragmas(conn):
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [conn.scalar(sa.text(f"PRAGMA {name}")) for name in names]

    assert sqlite_database.read_sync(pragmas) == ["wal", 2, 1]


def test_a_full_disk_is_unavailable_and_heals(sqlite_database):
    def shrink(conn):
        conn.execute(sa.text("PRAGMA max_page_count = 1"))

    def fill(conn):
        for _ in range(100):
            note("x" * 200)(conn)

    sqlite_database.write_sync(shrink)
    with pytest.raises(LedgerUnavailable, match="full"):
        sqlite_database.write_sync(fill)
    sqlite_database.write_sync(lambda c: c.execute(sa.text("PRAGMA max_page_count = 100000")))
    sqlite_database.write_sync(fill)
    assert len(sqlite_database.read_sync(targets)) == 100


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_moved_away_takes_no_more_writes(sqlite_database, is_replaced):
    """SQLite itself would go on writing to a file that is never opened again."""
    path = Path(str(sqlite_database.url.database))
    sqlite_database.write_sync(note("before"))
    path.rename(path.with_name("moved"))
    if is_replaced:
        path.touch()
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="moved or replaced"):
            sqlite_database.write_sync(note("lost"))
        with pytest.raises(LedgerUnavailable), sqlite_database.begin() as conn:
            note("lost")(conn)
    if not is_replaced:
        assert not path.exists(), "no empty file was made there"
    path.with_name("moved").rename(path)
    sqlite_database.write_sync(note("after"))
    assert sqlite_database.read_sync(targets) == ["before", "after"]


def test_a_dropped_postgres_connection_is_replaced_without_the_caller_noticing(
    make_postgres, migrated_postgres, tmp_path
):
    database = Database(make_postgres(migrated_postgres), data_dir=tmp_path)
    database.write_sync(note("before"))
    database.read_sync(targets)
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
    others += "current_database() AND pid <> pg_backend_pid()"
    killer = sa.create_engine(database.url)
    with killer.connect() as conn:
        conn.execute(sa.text(others))
    killer.dispose()
    assert database.read_sync(targets) == ["before"]
    database.write_sync(note("after"))
    assert database.read_sync(targets) == ["before", "after"]
    database.close()


def test_a_postgres_that_is_not_there_is_unavailable(tmp_path):
    url = f"postgresql://nobody@/nothing?host={tmp_path}"
    database = Database(url, data_dir=tmp_path)
    with pytest.raises(LedgerUnavailable):
        database.write_sync(note("lost"))
    with pytest.raises(LedgerUnavailable):
        database.read_sync(targets)
    database.close()


def test_a_slow_statement_ends_at_its_timeout(make_postgres, migrated_postgres, tmp_path):
    config = DatabaseConfig(statement_timeout_s=0.1)
    url = make_postgres(migrated_postgres)
    database = Database(url, data_dir=tmp_path, config=config)
    slow = database.submit(lambda c: c.execute(sa.text("SELECT pg_sleep(5)")))
    database.write_sync(note("neighbour"))
    with pytest.raises(LedgerUnavailable, match="timeout"):
        slow.result()
    database.close()


def test_two_writers_that_deadlock_both_finish(make_postgres, migrated_postgres, tmp_path):
    url = make_postgres(migrated_postgres)
    databases = [Database(url, data_dir=tmp_path) for _ in range(2)]
    databases[0].write_sync(lambda c: [create_tenant(c, n, now_ms=NOW_MS) for n in ("a1", "b1")])
    has_locked = {"a1": threading.Event(), "b1": threading.Event()}

    def cross(first, second):
        def fn(conn):
            update = sa.text("UPDATE tenants SET weight = weight + 1 WHERE name = :name")
            conn.execute(update, {"name": first})
            has_locked[first].set()
            has_locked[second].wait()
            conn.execute(update, {"name": second})

        return fn

    writes = [databases[0].submit(cross("a1", "b1")), databases[1].submit(cross("b1", "a1"))]
    for write in writes:
        write.result()
    weights = [t.weight for t in databases[0].read_sync(list_tenants)]
    assert weights == [3.0, 3.0]
    for database in databases:
        database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://u:secret@h/d"])
def test_a_database_that_cannot_keep_a_ledger_is_refused(url, tmp_path):
    with pytest.raises(UnsupportedDatabase) as caught:
        Database(url, data_dir=tmp_path)
    assert "secret" not in str(caught.value)
