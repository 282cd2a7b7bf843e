import asyncio

import sqlalchemy as sa

from server.database.leases import Leases, acquire
from server.database.tables import leases


def test_a_lease_is_ones_until_it_runs_out(postgres_database):
    def take(holder, lease_ms=60_000):
        return postgres_database.write_sync(lambda c: acquire(c, "settler/e1", holder, lease_ms))

    assert take("a")
    assert not take("b")
    assert take("a"), "a holder keeps its lease"
    assert postgres_database.write_sync(lambda c: acquire(c, "settler/e2", "b", 60_000))
    postgres_database.write_sync(lambda c: c.execute(sa.update(leases).values(expires_at_ms=0)))
    assert take("b")
    assert not take("a")


async def test_what_is_given_back_need_not_be_waited_for(postgres_database):
    first, second = Leases(postgres_database), Leases(postgres_database)
    assert await first.hold("chore/x")
    assert not await second.hold("chore/x")
    await first.release()
    assert await second.hold("chore/x")
    assert not await first.hold("chore/x")


def test_the_one_gateway_on_sqlite_has_every_lease(sqlite_database):
    assert asyncio.run(Leases(sqlite_database).hold("chore/x"))
