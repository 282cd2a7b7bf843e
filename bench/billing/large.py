"""Times of what users and chores ask of a large ledger on PostgreSQL, most of it copies of an hour.

The bound is the rows of an answer: a scan of a whole table that grows with requests is named.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from timeit import repeat
from typing import Any

import sqlalchemy as sa

from bench.billing.days import fill_days
from bench.billing.measurement import Measurement
from bench.billing.reading import Reading
from bench.databases import DATABASES
from bench.report import rounded
from server.billing.audit.run import audit_sums
from server.billing.budgets import read_sums
from server.billing.exports.pages import Range, read_page
from server.billing.holds import get_hold, insert_hold
from server.billing.old_holds import delete_old
from server.billing.receipts.rows import Place, read_receipts, select_receipts
from server.billing.statements import open_period, open_periods
from server.billing.tables import entries, holds, usage_events, usage_rollups
from server.billing.usage import Which, sum_entries
from server.database.database import Database, DatabaseConfig

_STEP_MS, _MONTH_MS = 2 * 3_600_000, 30 * 86_400_000
_COPIED = (holds, entries, usage_events, usage_rollups)


@dataclass(frozen=True, kw_only=True)
class Large(Measurement):
    """copies: with `requests` requests each.   runs: of each question; the fastest counts."""

    copies: int = 10
    requests: int = 10_000
    tenants: int = 20
    runs: int = 2

    def measure(self, folder: Path) -> dict[str, Any]:
        end_ms = int(time.time() * 1000)
        with DATABASES["postgresql"](folder / "postgres") as url:
            patient = DatabaseConfig(statement_timeout_s=3600)
            database = Database(url, data_dir=folder, config=patient)
            database.migrate()
            first = Reading(entries=self.requests, tenants=self.tenants)
            first.fill(database, end_ms - self.copies * _STEP_MS)
            with database.begin() as conn:
                # This role checks no foreign keys: copies refer to what their originals refer to.
                conn.exec_driver_sql("SET LOCAL session_replication_role = replica")
                sizes = {table.name: self._copy(conn, table) for table in _COPIED}
                fill_days(conn)
                conn.exec_driver_sql("ANALYZE usage_days")
            with database.engine.connect() as conn:
                asked = {q: self._ask(conn, ask) for q, ask in _questions(conn, end_ms).items()}
            database.close()
        return {"bytes_per_request": sizes, "questions": asked}

    def _copy(self, conn: sa.Connection, table: sa.Table) -> float:
        """Fill a table by moving keys and times; return its bytes a request, with indexes."""
        values = {column.name: column.name for column in table.c}
        moved = dict.fromkeys(("entry_id", "event_id", "journal_seq", "number"), self.requests)
        moved |= {name: _STEP_MS for name in values if name.endswith("_ms")}
        moved["receipt_seq"] = self.requests // self.tenants
        for name in moved.keys() & values.keys():
            values[name] = f"{name} + copy * {moved[name]}::bigint"
        utc = f"to_timestamp(({values.get('at_ms')}) / 1000) AT TIME ZONE 'UTC'"
        keys = {"request_id": "md5(request_id || copy)", "period": f"to_char({utc}, 'YYYY-MM')"}
        values |= {name: value for name, value in keys.items() if name in values}
        names, source = ", ".join(values), f"{table.name}, generate_series(1, {self.copies - 1})"
        query = f"SELECT {', '.join(values.values())} FROM {source} AS copy"
        conn.exec_driver_sql(f"INSERT INTO {table.name} ({names}) {query}")
        conn.exec_driver_sql(f"ANALYZE {table.name}")
        size = conn.scalar(sa.select(sa.func.pg_total_relation_size(table.name))) or 0
        return rounded(size / self.copies / self.requests)

    def _ask(self, conn: sa.Connection, ask: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        sa.event.listen(conn, "before_cursor_execute", lambda *given: asked.update([given[2:4]]))
        seconds = min(repeat(ask, conn.rollback, number=1, repeat=self.runs))
        plans = str([conn.exec_driver_sql(f"EXPLAIN {a}", b).all() for a, b in [*asked.items()]])
        scanned = [table.name for table in _COPIED if f"Seq Scan on {table.name} " in plans]
        return {"ms": rounded(seconds * 1000), "scanned": scanned}


def _questions(conn: sa.Connection, end_ms: int) -> dict[str, Any]:
    newest = sa.select(usage_events.c.request_id).order_by(usage_events.c.event_id.desc())
    hold = get_hold(conn, conn.scalar(newest.limit(1)) or "")
    assert hold is not None
    tenant_id, new, start_ms = hold.tenant_id, replace(hold, request_id="new"), end_ms - _MONTH_MS
    mine, month = Which(tenant_ids=[tenant_id]), open_periods(conn, tenant_id)[-1]
    export = Range(tenant_id=None, start_ms=start_ms, end_ms=end_ms, through=2**62)
    receipts = select_receipts().where(entries.c.tenant_id == tenant_id)
    receipt = select_receipts().where(usage_events.c.request_id == hold.request_id)
    return {
        "a tenant's costs of 30 days": lambda: sum_entries(conn, start_ms, end_ms, ("kind",), mine),
        "all tenants' usage": lambda: sum_entries(conn, start_ms, end_ms, ("tenant", "day")),
        "a receipt": lambda: conn.execute(receipt).one(),
        "1000 receipts": lambda: read_receipts(conn, receipts, Place(tenant_id, 7)),
        "an export's first page": lambda: read_page(conn, export, Place()),
        "a month's figures": lambda: open_period(conn, tenant_id, month),
        "a budget's sums": lambda: read_sums(conn, tenant_id, end_ms),
        "a hold": lambda: insert_hold(conn, new),
        "1000 old holds deleted": lambda: delete_old(conn, end_ms),
        "the audit of sums": lambda: audit_sums(conn),
    }
