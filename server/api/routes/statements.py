"""Statements of a tenant's months: issued ones, and the figures so far of open months."""

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.engine import Connection

from server.accounts import tenants
from server.api import errors
from server.api.bodies import json_body
from server.api.deps import DatabaseDep, StatementsDep, UsageKey
from server.billing import statements
from server.billing.rating import format_usd
from server.billing.statements import OpenPeriod, PeriodNotOver, Statement
from server.text.json_object import JsonObject

router = APIRouter()
admin_router = APIRouter()

MAX_LISTED = 120
MAX_ISSUED = 100
"""The most statements that one call issues, each in a transaction of its own."""

_PERIOD = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")


class _Issue(BaseModel):
    """The statements to issue. period: a month like 2026-11.   tenant: id or name; if it is left
    out, all tenants with entries in that month.
    """

    model_config = ConfigDict(extra="forbid")
    period: str = Field(max_length=16)
    tenant: str | None = Field(None, max_length=64)


@router.get("/statements")
async def list_statements(database: DatabaseDep, identity: UsageKey) -> JsonObject:
    """List the tenant's statements: open months first, then issued ones, newest month first."""
    tenant_id = identity.tenant_id

    def read(conn: Connection) -> tuple[list[OpenPeriod], list[Statement]]:
        periods = statements.open_periods(conn, tenant_id)[-MAX_LISTED:]
        unissued = [statements.open_period(conn, tenant_id, period) for period in periods]
        return unissued, statements.list_statements(conn, tenant_id, MAX_LISTED + 1)

    unissued, issued = await database.read(read)
    data = [_open_summary(period) for period in reversed(unissued)]
    data += [_summary(statement) for statement in issued[:MAX_LISTED]]
    return {"object": "list", "data": data, "has_more": len(issued) > MAX_LISTED}


@router.get("/statements/{period}")
async def get_statement(period: str, database: DatabaseDep, identity: UsageKey) -> JsonObject:
    """Get a month's statement, signed if it is issued, else with the figures so far."""
    _check_period(period)

    def read(conn: Connection) -> Statement | OpenPeriod:
        found = statements.get_statement(conn, identity.tenant_id, period)
        return found or statements.open_period(conn, identity.tenant_id, period)

    found = await database.read(read)
    if isinstance(found, OpenPeriod):
        return {"object": "statement", "status": "open", "statement": _open_figures(found)}
    return {
        "object": "statement",
        "status": "issued",
        "statement": found.values,
        "sha256": found.sha256,
        "signature": found.signature,
    }


@admin_router.post("/statements")
async def issue_statements(
    body: Annotated[_Issue, json_body(_Issue)], database: DatabaseDep, issuing: StatementsDep
) -> JsonObject:
    """Issue the statements of a month that is over.

    The call does not wait for the month's last requests to settle.
    """
    _check_period(body.period)

    def read(conn: Connection) -> list[str]:
        tenant_id = body.tenant and tenants.get_tenant(conn, body.tenant).tenant_id
        return statements.tenants_with(conn, body.period, tenant_id, MAX_ISSUED + 1)

    tenant_ids = await database.read(read)
    try:
        issued = [
            await asyncio.to_thread(issuing.issue, tenant_id, body.period, actor="operator")
            for tenant_id in tenant_ids[:MAX_ISSUED]
        ]
    except PeriodNotOver as error:
        raise errors.conflict(str(error), code="period_not_over", param="period") from None
    data = [{"tenant_id": found.tenant_id, **_summary(found)} for found in issued]
    return {"object": "list", "data": data, "has_more": len(tenant_ids) > MAX_ISSUED}


def _check_period(period: str) -> None:
    if not _PERIOD.fullmatch(period):
        raise errors.invalid_request(
            f"A period is a month like 2026-11, not {period[:40]!r}.", param="period"
        )


def _summary(statement: Statement) -> JsonObject:
    return {
        "object": "statement.summary",
        "period": statement.period,
        "status": "issued",
        "issued_at": statement.issued_at_ms // 1000,
        **_sums(statement),
        "sha256": statement.sha256,
    }


def _open_summary(period: OpenPeriod) -> JsonObject:
    return {
        "object": "statement.summary",
        "period": period.period,
        "status": "open",
        "issued_at": None,
        **_sums(period),
        "sha256": None,
    }


def _sums(of: Statement | OpenPeriod) -> JsonObject:
    return {
        "num_entries": of.num_entries,
        "total_nanousd": of.total_nanousd,
        "total_usd": format_usd(of.total_nanousd),
    }


def _open_figures(period: OpenPeriod) -> JsonObject:
    """The figures of an open month, under the names that a statement has for them."""
    return {
        "tenant_id": period.tenant_id,
        "period": period.period,
        "currency": "USD",
        "opening_balance_nanousd": period.opening_balance_nanousd,
        "num_entries": period.num_entries,
        "total_nanousd": period.total_nanousd,
        "totals": {
            kind: {"num_entries": count, "amount_nanousd": amount}
            for kind, (count, amount) in period.totals.items()
        },
        "closing_balance_nanousd": period.opening_balance_nanousd + period.total_nanousd,
    }
