"""The page of incidents: what the audit finds, what waits too long, and what happened to money."""

from typing import Annotated, Any

from fastapi import Query, Response
from sqlalchemy import Connection

from server.accounts.tenants import names_of
from server.api.deps import AuditorDep, DatabaseDep
from server.api.endpoints.audit import get_audit
from server.billing.holds import expired_by_engine
from server.billing.incidents import list_incidents
from server.billing.statements import overdue
from server.console.operator.advice import advice_on
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import OperatorViewer
from server.database.clock import database_now_ms

router = pages_router("/operator/incidents")

_PAGE_SIZE = 50
_MOST_OVERDUE = 20
_GRACE_MS = 60_000
"""Time after its expiry in which an open hold is not shown; a settler voids it within seconds."""

Before = Annotated[int | None, Query(ge=1, lt=2**63)]


@router.get("")
async def show(
    viewer: OperatorViewer, auditor: AuditorDep, database: DatabaseDep, before: Before = None
) -> Response:
    """Show the last audit, what waits, and a page of incidents.   before: id of an incident."""

    def read(conn: Connection) -> dict[str, Any]:
        at_ms = database_now_ms(conn)
        period, tenant_ids = overdue(conn, at_ms)
        return {
            "incidents": list_incidents(conn, _PAGE_SIZE + 1, before),
            "expired": expired_by_engine(conn, at_ms - _GRACE_MS),
            "period": period,
            "num_overdue": len(tenant_ids),
            "overdue": names_of(conn, tenant_ids[:_MOST_OVERDUE]),
        }

    found = await database.read(read)
    incidents = found.pop("incidents")
    older_url = None
    if len(incidents) > _PAGE_SIZE:
        older_url = f"/console/operator/incidents?before={incidents[_PAGE_SIZE - 1].incident_id}"
    return render(
        "operator_incidents.html",
        viewer,
        report=(await get_audit(auditor)).report,
        incidents=incidents[:_PAGE_SIZE],
        older_url=older_url,
        advice_on=advice_on,
        **found,
    )
