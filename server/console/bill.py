"""The pages of the bill: statements by month, one statement, and exports of the receipts."""

from importlib.util import find_spec
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path, Query, Response
from sqlalchemy import Connection

from registry.errors import NotFound
from server.api.deps import DatabaseDep
from server.api.endpoints import exports
from server.api.receipt_models import IssuedStatement
from server.billing import budgets, statements
from server.billing.exports.formats import FORMATS, ExportFormat
from server.billing.exports.schedules import INTERVAL_S
from server.billing.months import end_of, month_before
from server.billing.statements import Statement
from server.console.days import Days
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import TenantViewer, UsageViewer
from server.database.clock import now_ms
from server.database.database import Database
from server.text.times import day_of

router = pages_router("/bill")

_PAGE_SIZE = 24
_MOST_LINES = 200
"""Most lines and payments of a statement that its page lists; the document has all."""

Month = Annotated[str, Path(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])$")]
Before = Annotated[str, Query(pattern=r"^(20[0-9]{2}-(0[1-9]|1[0-2]))?$")]


class ExportQuery(Days):
    """The receipts to export: of what ended on some days, or those of a statement's period."""

    period: str | None = None
    format: ExportFormat = "csv"


@router.get("")
async def bill(viewer: UsageViewer, database: DatabaseDep, before: Before = "") -> Response:
    """Show the statements.   before: the last month of the page before."""
    tenant_id = viewer.identity.tenant_id

    def read(conn: Connection) -> dict[str, Any]:
        balance = budgets.read_sums(conn, tenant_id, now_ms())
        months = statements.open_periods(conn, tenant_id)
        # The ledger keeps the balance, so that no entry of the open months has to be read.
        open_nanousd = -balance.balance_nanousd - statements.opening_balance(conn, tenant_id)
        issued = statements.list_statements(conn, tenant_id, _PAGE_SIZE + 1, before or None)
        return {
            "balance": balance,
            "open_months": [(month, _spend_url(month)) for month in reversed(months[-_PAGE_SIZE:])],
            "open_nanousd": open_nanousd,
            "issued": issued[:_PAGE_SIZE],
            "older_url": _older_url(issued),
        }

    found = await database.read(read)
    scheduled = (await exports.list_schedules(database, viewer.identity)).data
    start_ms, end_ms = Days().range_ms()
    return render(
        "bill.html",
        viewer,
        is_first=not before,
        scheduled=scheduled,
        formats=[it for it in FORMATS if it != "parquet" or find_spec("pyarrow")],
        intervals=list(INTERVAL_S),
        start=day_of(start_ms),
        end=day_of(end_ms - 1),
        **found,
    )


# Declared before the pages of months, whose path it fits as well.
@router.get("/export")
async def export(
    viewer: UsageViewer, database: DatabaseDep, query: Annotated[ExportQuery, Query()]
) -> Response:
    """Get the receipts of a range of days as a file."""
    start_ms, end_ms = query.range_ms()
    start, end = (None if query.period else str(ms // 1000) for ms in (start_ms, end_ms))
    asked = exports.ExportQuery(format=query.format, start=start, end=end, period=query.period)
    return await exports.export_usage(database, viewer.identity, asked)


@router.get("/{period}")
async def statement(period: Month, viewer: UsageViewer, database: DatabaseDep) -> Response:
    """Show a month's statement."""
    found = await _find(database, viewer, period)
    return render("statement.html", viewer, it=found, values=found.values, most_lines=_MOST_LINES)


@router.get("/{period}/statement.json")
async def document(period: Month, viewer: UsageViewer, database: DatabaseDep) -> Response:
    """Get a month's statement as the API answers it, which `chorale receipts verify` reads."""
    found = await _find(database, viewer, period)
    answer = IssuedStatement(statement=found.values, sha256=found.sha256, signature=found.signature)
    headers = {"content-disposition": f'attachment; filename="statement-{found.period}.json"'}
    return Response(answer.model_dump_json(), media_type="application/json", headers=headers)


async def _find(database: Database, viewer: TenantViewer, period: str) -> Statement:
    """The statement of a month. Raises Invalid if none is issued."""
    tenant_id = viewer.identity.tenant_id
    found = await database.read(lambda c: statements.get_statement(c, tenant_id, period))
    if found is None:
        raise NotFound(
            "There is no statement of this month. It is issued when the month is over.",
            code="not_found",
        )
    return found


def _spend_url(month: str) -> str:
    """The page of spend of a month, by kind of entry."""
    days = {"start": day_of(end_of(month_before(month))), "end": day_of(end_of(month) - 1)}
    return f"/console?{urlencode(days | {'by': 'kind'})}"


def _older_url(issued: list[Statement]) -> str | None:
    """The URL of the next page.   issued: up to one statement more than a page has."""
    if len(issued) <= _PAGE_SIZE:
        return None
    return f"/console/bill?before={issued[_PAGE_SIZE - 1].period}"
