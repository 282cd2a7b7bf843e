"""Runs an audit: its checks, in their order, on one snapshot of the database."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.audit.acknowledgements import acknowledged_ids
from server.billing.audit.entries import check_entries, check_events
from server.billing.audit.holds import check_holds, check_open_holds
from server.billing.audit.journals import (
    check_journal_files,
    check_journals,
    check_meter,
    check_numbers,
    journal_starts,
)
from server.billing.audit.report import Finding, Progress, Report, Scope
from server.billing.audit.statements import check_documents, check_statements
from server.billing.audit.sums import check_accounts, check_entry_ids, check_months, check_rollups
from server.billing.tables import incidents
from server.database.clock import database_now_ms
from server.text.times import DAY_MS

Check = Callable[[Scope], Iterable[Finding]]

_SUMS: Sequence[Check] = (
    check_journals,
    check_entry_ids,
    check_accounts,
    check_months,
    check_rollups,
    check_statements,
    check_open_holds,
)
_ROWS: Sequence[Check] = (check_entries, check_events, check_numbers, check_holds, check_documents)
_RECENT_MS = 2 * DAY_MS


def audit(
    conn: Connection,
    *,
    engine_dirs: Sequence[Path] = (),
    since_ms: int = 0,
    progress: Progress = lambda check, num_rows: None,
) -> Report:
    """Run all checks, row by row. engine_dirs: folders of local engines whose files are read."""
    starts = journal_starts(engine_dirs)
    scope = _begin(conn, since_ms, progress)
    scope.starts = starts
    _run(scope, (*_SUMS, *_ROWS))
    for engine_dir in engine_dirs:
        scope.report.add(check_journal_files(scope, engine_dir))
        scope.report.add(check_meter(scope, engine_dir))
    return scope.report


def audit_sums(conn: Connection) -> Report:
    """Check only the sums, of all time; those of hours and days only of the last two.

    This takes 0.14 s of processor time for 60,000 events on SQLite, all checks take 14 s.
    """
    scope = _begin(conn, 0, lambda check, num_rows: None)
    scope.since_ms = scope.now_ms - _RECENT_MS
    _run(scope, _SUMS)
    return scope.report


def _begin(conn: Connection, since_ms: int, progress: Progress) -> Scope:
    if conn.dialect.name == "postgresql":
        # Every statement sees the database as the first one did; SQLite does that by itself.
        conn = conn.execution_options(isolation_level="REPEATABLE READ")
    now_ms = database_now_ms(conn)
    return Scope(conn, Report(now_ms, acknowledged_ids(conn)), now_ms, since_ms, progress)


def _run(scope: Scope, checks: Iterable[Check]) -> None:
    for check in checks:
        scope.report.add(check(scope))
    query = sa.select(incidents.c.kind, sa.func.count()).group_by(incidents.c.kind)
    for kind, count in scope.conn.execute(query.order_by(incidents.c.kind)):
        scope.report.incidents[kind] = count
