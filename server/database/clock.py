"""The clock that holds and leases expire by: the database's, which all gateways share."""

import time

import sqlalchemy as sa
from sqlalchemy.engine import Connection


def now_ms() -> int:
    """This machine's, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def database_now_ms(conn: Connection) -> int:
    """PostgreSQL's own; SQLite runs on this machine."""
    if conn.dialect.name == "sqlite":
        return now_ms()
    value: int | None = conn.scalar(sa.select(postgres_now()))
    assert value is not None
    return value


def from_now(conn: Connection, by_local_clock_ms: int, delay_ms: int) -> "sa.ColumnElement[int]":
    """The moment `delay_ms` after now, for an INSERT or UPDATE: one round trip fewer."""
    if conn.dialect.name == "sqlite":
        return sa.literal(by_local_clock_ms + delay_ms, sa.BigInteger)
    return postgres_now() + delay_ms


def postgres_now() -> "sa.ColumnElement[int]":
    """As part of a statement."""
    # Not now(): that is when the transaction began.
    seconds = sa.func.extract("epoch", sa.func.clock_timestamp())
    return sa.cast(seconds * 1000, sa.BigInteger)
