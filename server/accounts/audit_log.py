"""Queries of the audit log, which says what was done, by whom and to what; newest lines first."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.tables import audit_log
from server.database.clock import database_now_ms
from server.database.database import Database
from server.text.times import DAY_MS

MAX_LINES = 1000
PRUNED_AT_ONCE = 1000
"""Lines that are deleted in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """A line of the log, as registry.catalog.audit wrote it."""

    audit_id: int
    at_ms: int
    actor: str
    action: str
    target: str
    detail: str
    tenant_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Conditions for lines; a line must meet all that are set.

    of_keys: only what was done with API keys.   start_ms, end_ms: from start_ms to before end_ms.
    after: id of a line; only older lines are listed.
    """

    tenant_id: str | None = None
    of_keys: bool = False
    actor: str | None = None
    action: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    after: int | None = None


def list_lines(conn: Connection, asked: Asked, limit: int) -> list[AuditLine]:
    columns = audit_log.c
    query = sa.select(audit_log).order_by(columns.audit_id.desc()).limit(limit)
    for column, value in (
        (columns.tenant_id, asked.tenant_id),
        (columns.actor, asked.actor),
        (columns.action, asked.action),
    ):
        if value is not None:
            query = query.where(column == value)
    if asked.of_keys:
        query = query.where(columns.actor.startswith("key:", autoescape=True))
    if asked.start_ms is not None:
        query = query.where(columns.at_ms >= asked.start_ms)
    if asked.end_ms is not None:
        query = query.where(columns.at_ms < asked.end_ms)
    if asked.after is not None:
        query = query.where(columns.audit_id < asked.after)
    return [AuditLine(**row._mapping) for row in conn.execute(query)]


async def prune(database: Database, retention_days: int) -> None:
    """A chore: delete lines that are older than so many days. Raises LedgerUnavailable."""

    def delete(conn: Connection) -> int:
        old = sa.select(audit_log.c.audit_id).order_by(audit_log.c.at_ms).limit(PRUNED_AT_ONCE)
        old = old.where(audit_log.c.at_ms < database_now_ms(conn) - retention_days * DAY_MS)
        return conn.execute(sa.delete(audit_log).where(audit_log.c.audit_id.in_(old))).rowcount

    while await database.write(delete) == PRUNED_AT_ONCE:
        pass
