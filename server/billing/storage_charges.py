"""Charges tenants for storage and pins: a UTC day's become entries when the day is over.

So does a day's residency without a price; what an engine reports later is another entry.

Storage is counted by object: equal adapters of one tenant are one object, which is kept while any
version that refers to it is not deleted. On days that are not posted yet, a restored version counts
as never deleted. A gateway that was down posts all days that it missed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.tables import adapter_pins, adapter_versions
from server.billing.entries import lock_ledger
from server.billing.receipts.signing import Signer
from server.billing.storage_stretches import Kind, Stretch, Tier, post_stretches, take_days
from server.billing.tables import journal_positions
from server.database.clock import database_now_ms
from server.database.database import Database
from server.database.upsert import upsert
from server.text.times import DAY_MS

STORAGE = "kept/storage"
ACCOUNTS = (STORAGE, "kept/pins")
"""Kinds of what is posted by day, named as in the table of the engines' journal positions."""
Place = tuple[int, str]
"""A day, numbered from 1970-01-01, and the cursor of a page of what was kept on it."""

PAGE_SIZE = 100
"""Objects or pins in one transaction: 27 ms of the ledger's lock, on SQLite and 2 busy cores."""
_GRACE_MS = 60_000
"""Wait after a day, in which changes from its last moments are committed."""
INTERVAL_S = 60.0


class Kept:
    """The chore that posts the daily entries."""

    def __init__(
        self,
        database: Database,
        signer: Signer,
        *,
        now_ms: Callable[[Connection], int] = database_now_ms,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self._database = database
        self._signer = signer
        self._now_ms = now_ms
        self._page_size = page_size

    async def turn(self) -> int:
        """Post every day that is over and not posted. Returns the number of entries.

        The next turn continues one that was cut off: objects and pins whose entries of a day are
        posted are skipped. Raises LedgerUnavailable.
        """
        num_posted = 0
        for account in ACCOUNTS:
            place: Place | None = (0, "")
            while place is not None:
                posted, place = await self._database.write(partial(self.post_page, account, place))
                num_posted += posted
        while count := await self._database.write(self._post_residency):
            num_posted += count
        return num_posted

    def _post_residency(self, conn: Connection) -> int:
        lock_ledger(conn)
        now = self._now_ms(conn)
        stretches = take_days(conn, (now - _GRACE_MS) // DAY_MS, self._page_size)
        return len(post_stretches(conn, self._signer, stretches, now))

    def post_page(self, account: str, place: Place, conn: Connection) -> tuple[int, Place | None]:
        """Post a page of the first day that is over and not posted.

        place: after the page before; it counts for its own day only, which another poster may have
        finished. Returns (number of entries, next page's place), None if no day is over.
        """
        # The lock comes first, so that a second poster's page is posted entirely or not at all.
        lock_ledger(conn)
        now, last = self._now_ms(conn), _posted_day(conn, account)
        if last is None:
            _begin(conn, account, now)
            return 0, None
        day = last + 1
        if (day + 1) * DAY_MS + _GRACE_MS > now:
            return 0, None
        page, begin = stored if account == STORAGE else pinned, place[1] * (place[0] == day)
        stretches, after = page(conn, day, begin, self._page_size)
        posted = post_stretches(conn, self._signer, stretches, now)
        if after is not None:
            return len(posted), (day, after)
        is_it = journal_positions.c.engine_id == account
        values = {"settled_seq": day, "updated_at_ms": now}
        conn.execute(sa.update(journal_positions).where(is_it).values(**values))
        return len(posted), (day + 1, "")


def posted_until_ms(conn: Connection) -> int | None:
    """Return the time before which all storage and pins are posted; None before the first start."""
    days = [_posted_day(conn, account) for account in ACCOUNTS]
    known = [day for day in days if day is not None]
    return (min(known) + 1) * DAY_MS if len(known) == len(days) else None


def stored(conn: Connection, day: int, place: str, limit: int) -> tuple[list[Stretch], str | None]:
    """Return the storage intervals of a page of a day's objects, and the cursor of the next page.

    place: cursor of this page.
    """
    columns = adapter_versions.c
    was_there, times = _was_kept(day, columns.created_at_ms, columns.deleted_at_ms)
    tenant_id, _, digest = place.partition("/")
    keys = sa.select(columns.tenant_id, columns.digest).where(
        was_there,
        columns.tenant_id >= tenant_id,
        sa.or_(columns.tenant_id > tenant_id, columns.digest > digest),
    )
    page = keys.distinct().order_by(columns.tenant_id, columns.digest).limit(limit).subquery()
    is_of_page = (columns.tenant_id == page.c.tenant_id) & (columns.digest == page.c.digest)
    query = sa.select(adapter_versions, *times).join(page, is_of_page).where(was_there)
    # The version that created the object comes first.
    query = query.order_by(columns.created_at_ms, columns.adapter_id, columns.version)
    objects: dict[tuple[str, str], list[sa.Row[Any]]] = defaultdict(list)
    for row in conn.execute(query):
        objects[row.tenant_id, row.digest].append(row)
    last = "/".join(max(objects)) if len(objects) == limit else None
    named = [("/".join(key), rows) for key, rows in objects.items()]
    return [_stretch(day, *it, "storage", "storage", "store") for it in named], last


def pinned(conn: Connection, day: int, place: str, limit: int) -> tuple[list[Stretch], str | None]:
    """Return the intervals of a page of a day's pins, and the cursor of the next page.

    place: cursor of this page.
    """
    columns, version = adapter_pins.c, adapter_versions.c
    was_there, times = _was_kept(day, columns.pinned_at_ms, columns.unpinned_at_ms)
    is_its = (version.adapter_id == columns.adapter_id) & (version.version == columns.version)
    query = sa.select(adapter_pins, version.digest, *times).join(adapter_versions, is_its)
    query = query.where(was_there, columns.pin_id > place).order_by(columns.pin_id).limit(limit)
    rows = conn.execute(query).all()
    last = rows[-1].pin_id if len(rows) == limit else None
    return [_stretch(day, row.pin_id, [row], "pinned", "pin", "device") for row in rows], last


def _was_kept(
    day: int, begun: sa.Column[int], ended: sa.Column[int | None]
) -> tuple[sa.ColumnElement[bool], Sequence[sa.Label[Any]]]:
    """SQL for whether a row was kept at some time of a day, and the times that `_stretch` reads."""
    is_late = (ended > day * DAY_MS) & (ended > begun)
    was_kept = (begun < (day + 1) * DAY_MS) & (ended.is_(None) | is_late)
    return was_kept, (begun.label("begun_at_ms"), ended.label("ended_at_ms"))


def _stretch(
    day: int, name: str, rows: Sequence[sa.Row[Any]], kind: Kind, source: str, tier: Tier
) -> Stretch:
    """Return the stretch of a day in which any of the rows was kept. rows: the first names it."""
    row, spans = rows[0], _union(day, [(row.begun_at_ms, row.ended_at_ms) for row in rows])
    return Stretch(
        kind=kind,
        source=source,
        source_id=f"{name}/{day}",
        tenant_id=row.tenant_id,
        adapter_id=row.adapter_id,
        adapter_version=row.version,
        adapter_digest=row.digest,
        tier=tier,
        size_bytes=row.size_bytes,
        started_at_ms=spans[0][0],
        at_ms=spans[-1][1] - 1,
        duration_ms=sum(end - start for start, end in spans),
    )


def _union(day: int, lifetimes: Sequence[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """Return the parts of a day in lifetimes [start, end), in order; end None means still kept."""
    spans: list[tuple[int, int]] = []
    for begun, ended in sorted(lifetimes, key=lambda lifetime: lifetime[0]):
        start = max(begun, day * DAY_MS)
        end = (day + 1) * DAY_MS if ended is None else min(ended, (day + 1) * DAY_MS)
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        elif start < end:
            spans.append((start, end))
    return spans


def _posted_day(conn: Connection, account: str) -> int | None:
    query = sa.select(journal_positions.c.settled_seq)
    return conn.scalar(query.where(journal_positions.c.engine_id == account))


def _begin(conn: Connection, account: str, now_ms: int) -> None:
    """Record that the days before today are done, so that today is the first day posted."""
    values = {"engine_id": account, "settled_seq": now_ms // DAY_MS - 1}
    insert = upsert(conn.dialect.name, journal_positions)
    conn.execute(insert.values(**values, updated_at_ms=now_ms).on_conflict_do_nothing())
