"""The pages of requests: their log, and one request with its waterfall and its receipt."""

from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import Connection

from registry.errors import NotFound
from server.api.deps import DatabaseDep
from server.billing import request_log
from server.billing.holds import count_open
from server.billing.request_log import Asked, LoggedRequest
from server.console.days import Days
from server.console.formats import bars
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.spend import Name, named_keys
from server.console.viewers import UsageViewer

router = pages_router("/requests")

_PAGE_SIZE = 50


class LogQuery(Days):
    """A selection of requests.   model, key, outcome: "" for all.   before: the last page's end."""

    model: Name = ""
    key: Name = ""
    outcome: Literal["", "served", "failed", "aborted"] = ""
    before: Annotated[str, Field(pattern=r"^(\d{1,16}-\d{1,16})?$")] = ""


@router.get("")
async def log(
    viewer: UsageViewer, database: DatabaseDep, query: Annotated[LogQuery, Query()]
) -> Response:
    """Show the newest requests."""
    start_ms, end_ms = query.range_ms()
    asked = Asked(
        model=query.model or None,
        key_id=query.key or None,
        outcome=query.outcome or None,
        start_ms=start_ms,
        end_ms=end_ms,
    )
    at_ms, _, seq = query.before.partition("-")
    place = (int(at_ms), int(seq)) if query.before else None
    tenant_id = viewer.identity.tenant_id

    def read(conn: Connection) -> dict[str, Any]:
        return {
            "log": request_log.read_page(conn, tenant_id, asked, _PAGE_SIZE, place),
            "keys": named_keys(conn, viewer),
            "num_open": count_open(conn, tenant_id),
        }

    found = await database.read(read)
    shown = query.asked()
    older_url = None
    if older := found["log"].older:
        older_url = f"/console/requests?{urlencode(shown | {'before': f'{older[0]}-{older[1]}'})}"
    return render("requests.html", viewer, asked=shown, older_url=older_url, **found)


@router.get("/{request_id}")
async def request(request_id: str, viewer: UsageViewer, database: DatabaseDep) -> Response:
    """Show one request."""
    tenant_id = viewer.identity.tenant_id
    found = await database.read(lambda conn: request_log.find_request(conn, tenant_id, request_id))
    if found is None:
        raise NotFound(
            "There is no such request in the bill. One that has just ended is there in a second.",
            code="receipt_not_found",
        )
    return render("request.html", viewer, it=found, bars=bars_of(found))


def bars_of(found: LoggedRequest) -> list[tuple[str, int, float, float]]:
    """The bars of a request's phases, each with its milliseconds."""
    return bars(found.phases(), max(found.duration_ms, 1), least_width=0.3)
