"""The page of the slowest requests of all tenants, each with where its time went."""

from typing import Any

from fastapi import Response
from sqlalchemy import Connection

from server.accounts.tenants import names_of
from server.api.deps import DatabaseDep
from server.billing.request_log import MAX_COMPARED, Span, read_slowest
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.request_log import bars_of
from server.console.viewers import OperatorViewer

router = pages_router("/operator/requests")

_MOST = 25


@router.get("")
async def show(viewer: OperatorViewer, database: DatabaseDep, by: Span = "first_token") -> Response:
    """Show the slowest among the newest requests."""

    def read(conn: Connection) -> dict[str, Any]:
        slowest = read_slowest(conn, by, _MOST)
        names = names_of(conn, {it.tenant_id for it in slowest})
        return {"slowest": [(it, bars_of(it)) for it in slowest], "names": names}

    found = await database.read(read)
    return render("operator_requests.html", viewer, by=by, num_compared=MAX_COMPARED, **found)
