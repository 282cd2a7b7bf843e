"""Settled requests per second: gateways write a durable hold for each, settlers post its end.

The bound is to insert the same rows in transactions of the same size, through the same writer, into
tables that have nothing but a key; it is measured on the same database, right after. The rate
falls short of that limit by the cost of numbering, chaining, signing, sums and indexes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from bench.billing.traffic import ENGINE, Traffic
from bench.databases import DATABASES
from bench.measurement import Measurement
from bench.report import rate, ratio
from server.billing.holds import open_hold
from server.billing.ledger import post
from server.billing.prices import ensure_price
from server.billing.receipts.signing import Signer
from server.billing.tables import entries, holds, usage_events
from server.database.database import Database

T = TypeVar("T")
Write = Callable[[Connection], object]

SIGNER = Signer(bytes(range(32)))
_ROWS = (holds, usage_events, entries)


@dataclass(frozen=True, kw_only=True)
class Settles(Measurement):
    """The number of requests settled per second.

    writers: requests that wait for their hold at once.   group_size: ends in a transaction.

    commit_delays_ms: time added to every commit, as if the database were far away.
    """

    requests: int = 10_000
    warm_up: int = 512
    tenants: int = 20
    writers: int = 256
    group_size: int = 256
    commit_delays_ms: tuple[int, ...] = (0, 5)
    databases: tuple[str, ...] = ("sqlite", "postgresql")

    def measure(self, folder: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name in self.databases:
            for delay_ms in self.commit_delays_ms:
                place = folder / f"{name}-{delay_ms}"
                with DATABASES[name](place) as url, _opened(url, place, delay_ms) as database:
                    result[f"{name}, commits {delay_ms} ms longer"] = self._measure(database)
        return result

    def _measure(self, database: Database) -> dict[str, Any]:
        hold_s, post_s = self._settle(database)
        limit_hold_s, limit_post_s = self._insert(database)
        settled_s, limit_s = hold_s + post_s, limit_hold_s + limit_post_s
        return {
            "durability": database.read_sync(_durability),
            "settled_per_s": rate(self.requests, settled_s),
            "holds_per_s": rate(self.requests, hold_s),
            "posts_per_s": rate(self.requests, post_s),
            "insert_only_per_s": rate(self.requests, limit_s),
            "insert_only_holds_per_s": rate(self.requests, limit_hold_s),
            "insert_only_posts_per_s": rate(self.requests, limit_post_s),
            "share_of_insert_only": ratio(limit_s, settled_s),
        }

    def _settle(self, database: Database) -> tuple[float, float]:
        """Return the seconds of writing all holds, and of posting all ends."""
        start_ms = int(time.time() * 1000)
        price = database.write_sync(lambda conn: ensure_price(conn, start_ms))
        count = self.warm_up + self.requests
        traffic = Traffic(count, self.tenants, price, start_ms)
        made = list(traffic.holds())
        ends = list(traffic.ends(made))
        opens: list[Write] = [partial(_open, hold=hold) for hold in made]
        posts: list[Write] = [
            partial(post_group, records=group, now_ms=start_ms)
            for group in grouped(ends[self.warm_up :], self.group_size)
        ]
        self._write_all(database, opens[: self.warm_up])
        hold_s = self._write_all(database, opens[self.warm_up :])
        database.write_sync(partial(post_group, records=ends[: self.warm_up], now_ms=start_ms))
        post_s = _write_each(database, posts)
        posted = database.read_sync(lambda conn: conn.scalar(_count_posted()))
        assert posted == count, f"{posted} of {count} are settled"
        return hold_s, post_s

    def _insert(self, database: Database) -> tuple[float, float]:
        """Return the seconds of inserting the same rows into tables with nothing but a key: holds,
        then events and entries.
        """
        plain = [_plain(table) for table in _ROWS]
        rows = [database.read_sync(partial(_all_rows, table=table)) for table in _ROWS]
        database.write_sync(lambda conn: [table.create(conn) for table in plain])
        singles: list[Write] = [partial(_insert, groups=[(plain[0], [row])]) for row in rows[0]]
        groups: list[Write] = [
            partial(_insert, groups=[(plain[1], of_events), (plain[2], of_entries)])
            for of_events, of_entries in zip(
                *(grouped(rows[table][self.warm_up :], self.group_size) for table in (1, 2)),
                strict=True,
            )
        ]
        self._write_all(database, singles[: self.warm_up])
        return self._write_all(database, singles[self.warm_up :]), _write_each(database, groups)

    def _write_all(self, database: Database, writes: Sequence[Write]) -> float:
        """Return the seconds of all writes; `writers` of them wait at a time, and share commits."""

        async def work(left: Iterator[Write]) -> None:
            for write in left:
                await database.write(write)

        async def run() -> None:
            left = iter(writes)
            await asyncio.gather(*(work(left) for _ in range(self.writers)))

        start = time.perf_counter()
        asyncio.run(run())
        return time.perf_counter() - start


def grouped(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _write_each(database: Database, writes: Iterable[Write]) -> float:
    """Return the seconds of all writes, one after another: a settler posts a group once the group
    before it is durable.
    """
    start = time.perf_counter()
    for write in writes:
        database.write_sync(write)
    return time.perf_counter() - start


@contextmanager
def _opened(url: str, folder: Path, delay_ms: int) -> Iterator[Database]:
    database = Database(url, data_dir=folder)
    try:
        database.migrate()
        if delay_ms:
            sa.event.listen(database.engine, "commit", lambda _: time.sleep(delay_ms / 1000))
        yield database
    finally:
        database.close()


def _durability(conn: Connection) -> dict[str, str]:
    """Return the database's durability settings. Raises AssertionError if a commit may be lost."""
    if conn.dialect.name == "sqlite":
        said = {name: conn.scalar(sa.text(f"PRAGMA {name}")) for name in _SQLITE_DURABLE}
        assert said == _SQLITE_DURABLE, said
        return {"journal_mode": "wal", "synchronous": "full"}
    said = {name: conn.scalar(sa.text(f"SHOW {name}")) for name in _POSTGRES_DURABLE}
    assert said == _POSTGRES_DURABLE, said
    return said


_SQLITE_DURABLE = {"journal_mode": "wal", "synchronous": 2}
_POSTGRES_DURABLE = {"fsync": "on", "synchronous_commit": "on"}


def _open(conn: Connection, hold: Any) -> None:
    open_hold(conn, hold)


def post_group(conn: Connection, records: Sequence[Any], now_ms: int) -> None:
    result = post(conn, SIGNER, ENGINE, records, now_ms)
    assert result.posted == len(records), result
    assert not result.incidents, result


def _count_posted() -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(holds).where(holds.c.state == "posted")


def _plain(table: sa.Table) -> sa.Table:
    """Return a table with the same columns and key, but without indexes and constraints."""
    columns = [sa.Column(c.name, c.type, primary_key=c.primary_key) for c in table.c]
    return sa.Table(f"plain_{table.name}", sa.MetaData(), *columns)


def _all_rows(conn: Connection, table: sa.Table) -> list[dict[str, Any]]:
    order = list(table.primary_key.columns)
    return [dict(row) for row in conn.execute(sa.select(table).order_by(*order)).mappings()]


def _insert(conn: Connection, groups: Iterable[tuple[sa.Table, Sequence[dict[str, Any]]]]) -> None:
    for table, rows in groups:
        conn.execute(sa.insert(table), list(rows))
