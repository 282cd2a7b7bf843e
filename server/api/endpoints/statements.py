"""Statements of a tenant's months: issued ones, and the figures so far of open months."""

import asyncio
import re
from typing import Annotated, Literal, Self

from pydantic import Field
from sqlalchemy.engine import Connection

from registry.errors import Invalid
from server.accounts import tenants
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import DatabaseDep, StatementsDep, UsageKey, operators_router, tenants_router
from server.api.receipt_models import IssuedStatement, Sha256
from server.billing import statements
from server.billing.statements import OpenPeriod, Statement
from server.text.json_object import JsonObject

router = tenants_router()
admin_router = operators_router()

MAX_LISTED = 120
MAX_ISSUED = 100
"""The most statements that one call issues, each in a transaction of its own."""

_PERIOD = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")


class _Issue(BodyFields):
    """The statements to issue.

    period: a month of UTC, such as 2026-11.
    tenant: an id or a name; null for all tenants with entries in that month.
    """

    period: str = Field(max_length=16)
    tenant: str | None = Field(None, max_length=64)


class StatementSummary(Answer):
    """A statement, or what one would come to. issued_at, in Unix seconds, and sha256 are null of an
    open month.

    spent: charges, less corrections of them.   total: of all entries, credits and payments too.
    """

    object: Literal["statement.summary"] = "statement.summary"
    period: str = Field(examples=["2026-11"])
    status: Literal["issued", "open"]
    issued_at: int | None = Field(examples=[1_796_088_600])
    num_entries: int = Field(examples=[1246])
    spent_nanousd: int = Field(examples=[119_226_000])
    spent_usd: str = Field(examples=["0.119226000"])
    total_nanousd: int = Field(examples=[119_226_000])
    total_usd: str = Field(examples=["0.119226000"])
    sha256: Sha256 | None

    @classmethod
    def of(cls, found: Statement | OpenPeriod) -> Self:
        status: JsonObject = {"status": "issued"}
        if isinstance(found, OpenPeriod):
            status = {"status": "open", "issued_at": None, "sha256": None}
        return cls.of_record(found, **status)


class StatementList(ListAnswer[StatementSummary]):
    """The statements of a tenant: open months first, then issued ones, the newest first."""


class TenantStatement(StatementSummary):
    """A statement that was issued, with its tenant."""

    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])


class TenantStatementList(ListAnswer[TenantStatement]):
    """Statements that were issued now."""


class StatementTotal(Answer):
    """A sum of the entries of one kind."""

    num_entries: int = Field(examples=[1240])
    amount_nanousd: int = Field(examples=[119_226_000])


class FiguresSoFar(Answer):
    """The figures of an open month, under the names that a statement has for them.

    totals: by kind of entry.
    """

    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    period: str = Field(examples=["2026-11"])
    currency: Literal["USD"] = "USD"
    opening_balance_nanousd: int = Field(examples=[0])
    num_entries: int = Field(examples=[1240])
    total_nanousd: int = Field(examples=[119_226_000])
    spent_nanousd: int = Field(examples=[119_226_000])
    totals: dict[str, StatementTotal] = Field(
        examples=[{"usage": {"num_entries": 1240, "amount_nanousd": 119_226_000}}]
    )
    closing_balance_nanousd: int = Field(examples=[119_226_000])


class OpenStatement(Answer):
    """A month that has no statement yet."""

    object: Literal["statement"] = "statement"
    status: Literal["open"] = "open"
    statement: FiguresSoFar


StatementAnswer = Annotated[IssuedStatement | OpenStatement, Field(discriminator="status")]


@router.get("/statements")
async def list_statements(database: DatabaseDep, identity: UsageKey) -> StatementList:
    """List the tenant's statements: open months first, then issued ones, newest month first."""
    tenant_id = identity.tenant_id

    def read(conn: Connection) -> tuple[list[OpenPeriod], list[Statement]]:
        periods = statements.open_periods(conn, tenant_id)[-MAX_LISTED:]
        unissued = [statements.open_period(conn, tenant_id, period) for period in periods]
        return unissued, statements.list_statements(conn, tenant_id, MAX_LISTED + 1)

    unissued, issued = await database.read(read)
    listed: list[Statement | OpenPeriod] = [*reversed(unissued), *issued[:MAX_LISTED]]
    data = [StatementSummary.of(found) for found in listed]
    return StatementList(data=data, has_more=len(issued) > MAX_LISTED)


@router.get("/statements/{period}")
async def get_statement(period: str, database: DatabaseDep, identity: UsageKey) -> StatementAnswer:
    """Get a month's statement, signed if it is issued, else with the figures so far."""
    check_period(period)

    def read(conn: Connection) -> Statement | OpenPeriod:
        found = statements.get_statement(conn, identity.tenant_id, period)
        return found or statements.open_period(conn, identity.tenant_id, period)

    found = await database.read(read)
    if isinstance(found, OpenPeriod):
        return OpenStatement(statement=_open_figures(found))
    return IssuedStatement(statement=found.values, sha256=found.sha256, signature=found.signature)


@admin_router.post("/statements")
async def issue_statements(
    body: Annotated[_Issue, json_body(_Issue)], database: DatabaseDep, issuing: StatementsDep
) -> TenantStatementList:
    """Issue the statements of a month that is over.

    The call does not wait for the month's last requests to settle.
    """
    check_period(body.period)

    def read(conn: Connection) -> list[str]:
        tenant_id = body.tenant and tenants.get_tenant(conn, body.tenant).tenant_id
        return statements.tenants_with(conn, body.period, tenant_id, MAX_ISSUED + 1)

    tenant_ids = await database.read(read)
    issued = [
        await asyncio.to_thread(issuing.issue, tenant_id, body.period, actor="operator")
        for tenant_id in tenant_ids[:MAX_ISSUED]
    ]
    data = [TenantStatement.of(found) for found in issued]
    return TenantStatementList(data=data, has_more=len(tenant_ids) > MAX_ISSUED)


def check_period(period: str) -> None:
    """Check that a period is a month. Raises Invalid."""
    if not _PERIOD.fullmatch(period):
        raise Invalid(f"A period is a month like 2026-11, not {period[:40]!r}.", param="period")


def _open_figures(period: OpenPeriod) -> FiguresSoFar:
    return FiguresSoFar.of_record(
        period,
        totals={
            kind: StatementTotal(num_entries=count, amount_nanousd=amount)
            for kind, (count, amount) in period.totals.items()
        },
        closing_balance_nanousd=period.opening_balance_nanousd + period.total_nanousd,
    )
