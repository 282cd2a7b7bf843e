"""Charges tenants for storage and pins: a UTC day's become entries when the day is over.

So does a day's residency without a price; what an engine reports later is another entry.

Storage is counted by object: equal adapters of one tenant are one object, which is kept while any
version that refers to it is not deleted. On days that are not posted yet, a restored version counts
as never deleted. A gateway that was down posts all days that it missed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

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

Account = Literal["storage", "pins"]
ACCOUNTS: tuple[Account, ...] = ("storage", "pins")
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

    def post_page(
        self, account: Account, place: Place, conn: Connection
    ) -> tuple[int, Place | None]:
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
        page, begin = stored if account == "storage" else pinned, place[1] * (place[0] == day)
        stretches, after = page(conn, day, begin, self._page_size)
        posted = post_stretches(conn, self._signer, stretches, now)
        if after is not None:
            return len(posted), (day, after)
        is_it = journal_positions.c.engine_id == _name(account)
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
    start, end = day * DAY_MS, (day + 1) * DAY_MS
    was_there = (columns.created_at_ms < end) & (
        columns.deleted_at_ms.is_(None) | (columns.deleted_at_ms > start)
    )
    tenant_id, _, digest = place.partition("/")
    keys = sa.select(columns.tenant_id, columns.digest).where(
        was_there,
        columns.tenant_id >= tenant_id,
        sa.or_(columns.tenant_id > tenant_id, columns.digest > digest),
    )
    page = keys.distinct().order_by(columns.tenant_id, columns.digest).limit(limit).subquery()
    is_of_page = (columns.tenant_id == page.c.tenant_id) & (columns.digest == page.c.digest)
    query = sa.select(adapter_versions).join(page, is_of_page).where(was_there)
    # The version that created the object comes first.
    query = query.order_by(columns.created_at_ms, columns.adapter_id, columns.version)
    objects: dict[tuple[str, str], list[sa.Row[Any]]] = defaultdict(list)
    for row in conn.execute(query):
        objects[row.tenant_id, row.digest].append(row)
    found = [_storage(day, rows) for rows in objects.values()]
    last = "/".join(max(objects)) if len(objects) == limit else None
    return [stretch for stretch in found if stretch is not None], last


def pinned(conn: Connection, day: int, place: str, limit: int) -> tuple[list[Stretch], str | None]:
    """Return the intervals of a page of a day's pins, and the cursor of the next page.

    place: cursor of this page.
    """
    columns, version = adapter_pins.c, adapter_versions.c
    start, end = day * DAY_MS, (day + 1) * DAY_MS
    is_its = (version.adapter_id == columns.adapter_id) & (version.version == columns.version)
    query = (
        sa.select(adapter_pins, version.digest)
        .join(adapter_versions, is_its)
        .where(
            columns.pinned_at_ms < end,
            columns.unpinned_at_ms.is_(None) | (columns.unpinned_at_ms > start),
            columns.pin_id > place,
        )
        .order_by(columns.pin_id)
        .limit(limit)
    )
    rows = conn.execute(query).all()
    found = [_pin(day, row) for row in rows]
    last = rows[-1].pin_id if len(rows) == limit else None
    return [stretch for stretch in found if stretch is not None], last


def _storage(day: int, versions: Sequence[sa.Row[Any]]) -> Stretch | None:
    """Return an object's stretch on a day, or None. versions: the object's, oldest first."""
    first = versions[0]
    spans = _union(day, [(row.created_at_ms, row.deleted_at_ms) for row in versions])
    name = f"{first.tenant_id}/{first.digest}"
    return _stretch(spans, first, "storage", "storage", f"{name}/{day}", "store")


def _pin(day: int, row: sa.Row[Any]) -> Stretch | None:
    spans = _union(day, [(row.pinned_at_ms, row.unpinned_at_ms)])
    return _stretch(spans, row, "pinned", "pin", f"{row.pin_id}/{day}", "device")


def _stretch(
    spans: Sequence[tuple[int, int]], row: sa.Row[Any], kind: Kind, source: str, source_id: str,
    tier: Tier,
) -> Stretch | None:  # fmt: skip
    """Return the stretch of an adapter's version that was kept in these spans, None for none."""
    if not spans:
        return None
    return Stretch(
        kind=kind,
        source=source,
        source_id=source_id,
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


def _posted_day(conn: Connection, account: Account) -> int | None:
    query = sa.select(journal_positions.c.settled_seq)
    return conn.scalar(query.where(journal_positions.c.engine_id == _name(account)))


def _begin(conn: Connection, account: Account, now_ms: int) -> None:
    """Record that the days before today are done, so that today is the first day posted."""
    values = {"engine_id": _name(account), "settled_seq": now_ms // DAY_MS - 1}
    insert = upsert(conn.dialect.name, journal_positions)
    conn.execute(insert.values(**values, updated_at_ms=now_ms).on_conflict_do_nothing())


def _name(account: Account) -> str:
    """Return the account's name in the table of the engines' journal positions."""
    return f"kept/{account}"
