"""Sums by day that a gateway of an older release did not add to are made again."""

import asyncio

import sqlalchemy as sa

from server.billing.tables import usage_days
from server.billing.usage import sum_entries
from server.billing.usage_days import mend_days, wrong_days
from server.database.clock import now_ms
from server.database.database import Database
from tests.server.export_ledger import use

DAY_MS = 86_400_000


def rows_of(database: Database) -> list[sa.Row]:
    query = sa.select(usage_days).order_by(*usage_days.primary_key)
    return database.read_sync(lambda conn: conn.execute(query).all())


def test_days_that_an_older_gateway_left_behind_are_made_again(database: Database) -> None:
    now = now_ms()
    for tenant_id, days_ago, model in (("ten_1", 0, "a"), ("ten_1", 1, "b"), ("ten_2", 0, "a")):
        use(database, tenant_id, 3, model=model, at_ms=now - days_ago * DAY_MS)
    right = rows_of(database)
    today, yesterday = now // DAY_MS * DAY_MS, now // DAY_MS * DAY_MS - DAY_MS
    with_day = usage_days.c.day_ms
    # It posted entries of one day beside a newer gateway, and those of another day alone.
    database.write_sync(
        lambda c: c.execute(
            sa.update(usage_days)
            .where(usage_days.c.tenant_id == "ten_1", with_day == today)
            .values(num_requests=1, amount_nanousd=usage_days.c.amount_nanousd - 7)
        )
    )
    database.write_sync(lambda c: c.execute(sa.delete(usage_days).where(with_day == yesterday)))
    found = database.read_sync(lambda conn: wrong_days(conn, 10))
    assert sorted(found) == [("ten_1", yesterday), ("ten_1", today)]
    asyncio.run(mend_days(database))
    assert rows_of(database) == right
    assert database.read_sync(lambda conn: wrong_days(conn, 10)) == []


def test_right_days_are_left_alone(database: Database) -> None:
    use(database, "ten_1", 5, model="a", at_ms=now_ms())
    assert database.read_sync(lambda conn: wrong_days(conn, 10)) == []
    before = rows_of(database)
    asyncio.run(mend_days(database))
    assert rows_of(database) == before
    (total,) = database.read_sync(lambda conn: sum_entries(conn, 0, now_ms() + DAY_MS))
    assert total.num_requests == 5
