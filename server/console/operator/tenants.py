"""The pages of tenants: all of them with their figures, and one with what may be changed."""

import secrets
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from server.accounts.auth import SCOPES
from server.accounts.keys import MAX_NAME, list_keys
from server.api.accounts import Account
from server.api.deps import DatabaseDep
from server.api.endpoints.admin import get_tenant
from server.api.endpoints.budgets import list_budgets
from server.billing import request_log
from server.billing.budgets import read_sums
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.tenant_figures import Order, list_tenant_figures
from server.billing.usage import Selection, sum_entries
from server.console.days import Days
from server.console.keys import state_of
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.spend import plot_of
from server.console.viewers import OperatorViewer
from server.database.clock import now_ms

router = pages_router("/operator/tenants")

_PAGE_SIZE = 50
_LAST_ROWS = 20


class TenantsQuery(BaseModel):
    """Conditions, order and page.   name: a part of it.   status: "" for all.   page: from 1 on."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9._-]*$")] = ""
    status: Literal["", "active", "suspended"] = ""
    order: Order = "spend"
    page: Annotated[int, Field(ge=1, le=100_000)] = 1


@router.get("")
async def list_all(
    viewer: OperatorViewer, database: DatabaseDep, query: Annotated[TenantsQuery, Query()]
) -> Response:
    """Show a page of tenants."""
    found = await database.read(
        lambda conn: list_tenant_figures(
            conn,
            now_ms=now_ms(),
            part=query.name,
            status=query.status or None,
            order=query.order,
            limit=_PAGE_SIZE + 1,
            offset=(query.page - 1) * _PAGE_SIZE,
        )
    )
    asked = query.model_dump()
    next_url = f"/console/operator/tenants?{urlencode(asked | {'page': query.page + 1})}"
    return render(
        "operator_tenants.html",
        viewer,
        asked=asked,
        tenants=found[:_PAGE_SIZE],
        next_url=next_url if len(found) > _PAGE_SIZE else None,
    )


@router.get("/{tenant}")
async def show(
    tenant: str, viewer: OperatorViewer, database: DatabaseDep, query: Annotated[Days, Query()]
) -> Response:
    """Show one tenant by id or name: its figures, what may be changed, and its last requests."""
    start_ms, end_ms = query.range_ms()
    found = await get_tenant(tenant, database)
    tenant_id = found.tenant_id
    only = Selection(tenant_ids=[tenant_id], kinds=SPEND_KINDS)

    def read(conn: Connection) -> dict[str, Any]:
        asked = request_log.Asked(start_ms=start_ms, end_ms=end_ms)
        days = sum_entries(conn, start_ms, end_ms, ["day"], only)
        figures = list_tenant_figures(conn, now_ms=now_ms(), tenant_id=tenant_id, limit=1)
        keys = list_keys(conn, tenant_id, limit=_LAST_ROWS, newest_first=True)
        return {
            "keys": [(key, state_of(key)) for key in keys],
            "balance": read_sums(conn, tenant_id, now_ms()).balance_nanousd,
            "figures": figures[0],
            "days": days,
            "plot": plot_of(days, start_ms, end_ms),
            "log": request_log.read_page(conn, tenant_id, asked, _LAST_ROWS),
        }

    return render(
        "operator_tenant.html",
        viewer,
        tenant=found,
        scopes=sorted(SCOPES),
        max_name=MAX_NAME,
        once=secrets.token_hex(16),
        budgets=(await list_budgets(Account(tenant_id), database)).data,
        **await database.read(read),
    )
