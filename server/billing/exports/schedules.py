"""Scheduled exports: each object has the receipts of a tenant's chain since the last object.

Objects are named `exports/{tenant_id}/{format}/{first_seq}-{last_seq}.{extension}`. They are in
posting order, so that no receipt comes late, is in two objects, or is missing.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import NoRoom, StorageError
from registry.extras import ExtraMissing
from registry.storage.free_space import WorkDir
from registry.storage.storage import Storage, folder_of
from server.billing.exports.formats import INFO, ExportFormat, open_encoder
from server.billing.receipts.receipt import Receipt
from server.billing.receipts.rows import read_receipts, select_receipts
from server.billing.tables import entries, scheduled_exports, tenant_accounts
from server.database import clock
from server.database.database import Database
from server.database.upsert import put

Interval = Literal["hour", "day"]
INTERVAL_S: dict[Interval, int] = {"hour": 3600, "day": 86_400}
TURN_S = 10.0
"""Interval between polls for due schedules."""
ROWS_PER_OBJECT = 100_000
PAGE_SIZE = 500
MAX_DUE = 1000
"""Schedules in one turn; the longest due come first."""

_MAX_ERROR = 500
_columns = scheduled_exports.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One row of `scheduled_exports`. error: error of the last try; None after a success."""

    tenant_id: str
    format: ExportFormat
    interval_s: int
    exported_seq: int
    next_at_ms: int
    created_at_ms: int
    error: str | None


def prefix_of(schedule: Schedule) -> str:
    return f"exports/{schedule.tenant_id}/{schedule.format}/"


def list_of(conn: Connection, tenant_id: str) -> list[Schedule]:
    query = sa.select(scheduled_exports).where(_columns.tenant_id == tenant_id)
    rows = conn.execute(query.order_by(_columns.format)).mappings()
    return [Schedule(**row) for row in rows]


def list_due(conn: Connection, now_ms: int) -> list[Schedule]:
    query = sa.select(scheduled_exports).where(_columns.next_at_ms <= now_ms)
    query = query.order_by(_columns.next_at_ms, _columns.tenant_id, _columns.format).limit(MAX_DUE)
    return [Schedule(**row) for row in conn.execute(query).mappings()]


def put_schedule(
    conn: Connection,
    tenant_id: str,
    format: ExportFormat,
    interval_s: int,
    now_ms: int,
    *,
    actor: str = "operator",
) -> Schedule:
    """Add a schedule, or change the interval of an existing one; both are due at once. Audited."""
    values = {
        "tenant_id": tenant_id,
        "format": format,
        "interval_s": interval_s,
        "exported_seq": 0,
        "next_at_ms": now_ms,
        "created_at_ms": now_ms,
    }
    row = put(conn, scheduled_exports, values, "interval_s", "next_at_ms")
    detail = f"{format}, each {interval_s} s"
    record_audit(conn, tenant_id, "export.schedule", detail, at_ms=now_ms, actor=actor)
    return Schedule(**row)


def delete_schedule(
    conn: Connection,
    tenant_id: str,
    format: ExportFormat,
    now_ms: int,
    *,
    actor: str = "operator",
) -> None:
    """Delete a schedule and write an audit row; do nothing if there is none."""
    if conn.execute(sa.delete(scheduled_exports).where(*_is(tenant_id, format))).rowcount:
        record_audit(conn, tenant_id, "export.unschedule", format, at_ms=now_ms, actor=actor)


class ScheduledExports:
    """Writes the objects of due schedules. work: where objects are until they are complete."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        work: WorkDir,
        *,
        now_ms: Callable[[], int] = clock.now_ms,
        rows_per_object: int = ROWS_PER_OBJECT,
    ) -> None:
        self._database = database
        self._storage = storage
        self._work = work
        self._now_ms = now_ms
        self._rows_per_object = rows_per_object

    async def turn(self) -> None:
        """Bring every due schedule up to date. A failed one stays due, and its error is recorded.

        Raises LedgerUnavailable.
        """
        now_ms = self._now_ms()
        for schedule in await self._database.read(partial(list_due, now_ms=now_ms)):
            try:
                await self._bring_up_to_date(schedule)
            except (NoRoom, StorageError, ExtraMissing, OSError) as error:
                await self._update(schedule, error=str(error)[:_MAX_ERROR])
            else:
                interval_ms = schedule.interval_s * 1000
                next_at_ms = (now_ms // interval_ms + 1) * interval_ms
                await self._update(schedule, next_at_ms=next_at_ms, error=None)

    async def _bring_up_to_date(self, schedule: Schedule) -> None:
        """Export the chain up to its present end; later receipts are exported the next time."""
        tenant_id, seq = schedule.tenant_id, schedule.exported_seq
        through = await self._database.read(partial(_last_seq, tenant_id=tenant_id))
        while seq < through:
            # A killed process may have left an object that the row does not mention. The object
            # stays as it is, since readers of the store may have it already.
            last = await asyncio.to_thread(self._find_written, schedule, seq + 1)
            if last is None:
                last = min(seq + self._rows_per_object, through)
                await self._write_object(schedule, seq + 1, last)
            # The row is updated only after the object is written.
            await self._update(schedule, exported_seq=last)
            seq = last

    def _find_written(self, schedule: Schedule, first: int) -> int | None:
        """Return the last seq of an existing object that begins with seq `first`, or None."""
        start = f"{prefix_of(schedule)}{first:012d}-"
        for found in self._storage.list(start):
            if match := re.match(r"[0-9]{12}", found.key.removeprefix(start)):
                return int(match[0])
        return None

    async def _write_object(self, schedule: Schedule, first: int, last: int) -> None:
        """Write the receipts `first` to `last`; all of them exist, since a chain has no gaps."""
        key = f"{prefix_of(schedule)}{first:012d}-{last:012d}.{INFO[schedule.format].extension}"
        encoder = await asyncio.to_thread(open_encoder, schedule.format)
        with self._work.folder("export-", 0) as folder:
            file = folder / "object"
            await asyncio.to_thread(self._append, file, encoder.begin())
            for seq in range(first, last + 1, PAGE_SIZE):
                to = min(seq + PAGE_SIZE - 1, last)
                page = await self._database.read(
                    partial(_read, tenant_id=schedule.tenant_id, first=seq, last=to)
                )
                assert len(page) == to - seq + 1, "a gap in a chain of receipts"
                rows = await asyncio.to_thread(encoder.add, page)
                await asyncio.to_thread(self._append, file, rows)
            await asyncio.to_thread(self._append, file, encoder.end())
            await asyncio.to_thread(self._put, key, file)

    def _append(self, file: Path, data: bytes) -> None:
        with self._work.space.promise((file, len(data))), file.open("ab") as whole:
            whole.write(data)

    def _put(self, key: str, file: Path) -> None:
        with self._work.space.promise((folder_of(self._storage), file.stat().st_size)):
            self._storage.put(key, file)

    async def _update(self, schedule: Schedule, **values: Any) -> None:
        query = sa.update(scheduled_exports).where(*_is(schedule.tenant_id, schedule.format))
        await self._database.write(lambda conn: conn.execute(query.values(**values)))


def _last_seq(conn: Connection, tenant_id: str) -> int:
    query = sa.select(tenant_accounts.c.receipt_seq)
    return conn.scalar(query.where(tenant_accounts.c.tenant_id == tenant_id)) or 0


def _read(conn: Connection, tenant_id: str, first: int, last: int) -> list[Receipt]:
    seq = entries.c.receipt_seq
    query = select_receipts().where(entries.c.tenant_id == tenant_id, seq.between(first, last))
    return read_receipts(conn, query)


def _is(tenant_id: str, format: ExportFormat) -> tuple[sa.ColumnElement[bool], ...]:
    return _columns.tenant_id == tenant_id, _columns.format == format
