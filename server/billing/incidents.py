"""Incidents: what should not have happened to money, on record for the operator."""

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import incidents


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """An incident as `record_incident` wrote it."""

    incident_id: int
    at_ms: int
    kind: str
    engine_id: str | None
    request_id: str | None
    detail: str


def record_incident(
    conn: Connection,
    *,
    at_ms: int,
    kind: str,
    detail: str,
    engine_id: str | None = None,
    request_id: str | None = None,
    same: Collection[str] = (),
) -> bool:
    """Record an incident in the transaction that found it.

    same: names of fields; nothing is recorded if one that is equal in them is. Returns whether it
    was recorded.
    """
    values = {"kind": kind, "detail": detail, "engine_id": engine_id, "request_id": request_id}
    if same:
        known = sa.select(incidents.c.incident_id).filter_by(
            **{name: values[name] for name in same}
        )
        if conn.scalar(known.limit(1)) is not None:
            return False
    conn.execute(sa.insert(incidents).values(at_ms=at_ms, **values))
    return True


def list_incidents(conn: Connection, limit: int, before: int | None = None) -> list[Incident]:
    """Read the newest incidents, by primary key.   before: id of a line; only older are read."""
    query = sa.select(incidents).order_by(incidents.c.incident_id.desc()).limit(limit)
    if before is not None:
        query = query.where(incidents.c.incident_id < before)
    return [Incident(**row._mapping) for row in conn.execute(query)]
