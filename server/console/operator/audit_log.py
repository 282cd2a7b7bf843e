"""The page of the audit log: who did what to what, newest first."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import Connection

from server.accounts import tenants
from server.accounts.audit_log import Asked, list_lines
from server.api.deps import DatabaseDep, SettingsDep
from server.console.days import Days
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import OperatorViewer

router = pages_router("/operator/audit")

_PAGE_SIZE = 100

Word = Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")]


class LogQuery(Days):
    """Conditions and page; without days, all of the log, which is read by its primary key.

    tenant: an id or a name.   after: id of the last line of the page before.
    """

    actor: Word = ""
    action: Word = ""
    tenant: Word = ""
    after: Annotated[int, Field(ge=0, lt=2**63)] = 0


@router.get("")
async def show(
    viewer: OperatorViewer,
    database: DatabaseDep,
    settings: SettingsDep,
    query: Annotated[LogQuery, Query()],
) -> Response:
    """Show a page of the log."""
    has_days = query.start or query.end
    start_ms, end_ms = query.range_ms() if has_days else (None, None)

    def read(conn: Connection) -> dict[str, Any]:
        asked = Asked(
            tenant_id=tenants.get_tenant(conn, query.tenant).tenant_id if query.tenant else None,
            actor=query.actor or None,
            action=query.action or None,
            start_ms=start_ms,
            end_ms=end_ms,
            after=query.after or None,
        )
        lines = list_lines(conn, asked, _PAGE_SIZE + 1)
        owners = {line.tenant_id for line in lines if line.tenant_id}
        return {"lines": lines, "names": tenants.names_of(conn, owners)}

    found = await database.read(read)
    asked = query.model_dump()
    lines = found["lines"][:_PAGE_SIZE]
    older_url = None
    if len(found["lines"]) > _PAGE_SIZE:
        place = urlencode(asked | {"after": lines[-1].audit_id})
        older_url = f"/console/operator/audit?{place}"
    return render(
        "operator_audit.html",
        viewer,
        asked=asked,
        lines=lines,
        names=found["names"],
        retention_days=settings.audit_log_retention_days,
        older_url=older_url,
    )
