"""The clock by which holds and leases expire: the database's, which all gateways share."""

import time

import sqlalchemy as sa
from sqlalchemy.engine import Connection


def now_ms() -> int:
    """The time of this machine in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def database_now_ms(conn: Connection) -> int:
    """The database's time in Unix milliseconds; for SQLite it is this machine's."""
    if conn.dialect.name == "sqlite":
        return now_ms()
    value: int | None = conn.scalar(_NOW)
    assert value is not None
    return value


def from_now(conn: Connection, by_local_clock_ms: int, delay_ms: int) -> "sa.ColumnElement[int]":
    """SQL for the time `delay_ms` after now in an INSERT or UPDATE, which saves a round trip."""
    if conn.dialect.name == "sqlite":
        return sa.literal(by_local_clock_ms + delay_ms, sa.BigInteger)
    return postgres_now() + delay_ms


def postgres_now() -> "sa.ColumnElement[int]":
    """SQL for PostgreSQL's time in Unix milliseconds."""
    # clock_timestamp() is used because now() is the time when the transaction began.
    seconds = sa.func.extract("epoch", sa.func.clock_timestamp())
    return sa.cast(seconds * 1000, sa.BigInteger)


_NOW = sa.select(postgres_now())
