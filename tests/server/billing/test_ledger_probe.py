import asyncio
from pathlib import Path

import sqlalchemy as sa

from server.billing.ledger_probe import LedgerProbe
from server.database.tables import leases


async def test_a_ledger_that_takes_no_writes_is_not_writable_and_heals(sqlite_database):
    now = 0.0
    probe = LedgerProbe(sqlite_database, clock=lambda: now)
    path = Path(str(sqlite_database.url.database))
    assert await probe.is_writable()
    path.rename(path.with_name("moved"))
    now = 1.0
    assert not await probe.is_writable()
    path.with_name("moved").rename(path)
    now = 2.0
    assert await probe.is_writable()


async def test_it_is_asked_by_a_write_that_changes_something_and_once_a_second(each_database):
    commits = []
    sa.event.listen(each_database.engine, "commit", lambda conn: commits.append(conn))
    now = 5.0
    probe = LedgerProbe(each_database, clock=lambda: now)
    for later_s in (0.0, 0.9, 0.1):
        now += later_s
        assert all(await asyncio.gather(*(probe.is_writable() for _ in range(7))))
    assert len(commits) == 2
    query = sa.select(sa.func.count()).select_from(leases)
    assert each_database.read_sync(lambda conn: conn.execute(query).scalar_one()) == 1
