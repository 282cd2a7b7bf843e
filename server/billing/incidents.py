"""The incidents that the ledger has on record, newest first, for the operator."""

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import incidents


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that should not have happened to money, as `ledger.record_incident` wrote it."""

    incident_id: int
    at_ms: int
    kind: str
    engine_id: str | None
    request_id: str | None
    detail: str


def list_incidents(conn: Connection, limit: int, before: int | None = None) -> list[Incident]:
    """Read the newest incidents, by primary key.   before: id of a line; only older are read."""
    query = sa.select(incidents).order_by(incidents.c.incident_id.desc()).limit(limit)
    if before is not None:
        query = query.where(incidents.c.incident_id < before)
    return [Incident(**row._mapping) for row in conn.execute(query)]
