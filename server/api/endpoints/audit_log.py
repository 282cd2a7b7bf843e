"""The audit log: all of it for the operator; for a tenant's admin, what the tenant's keys did."""

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from server.accounts import tenants
from server.accounts.audit_log import MAX_LINES, Asked, list_lines
from server.api.answer import Answer, Page
from server.api.deps import DatabaseDep, TenantAdminKey, operators_router, tenants_router
from server.api.times import UnixSeconds, check_order
from server.database.clock import now_ms
from server.database.database import Database

router = tenants_router()
admin_router = operators_router()

_MAX_ID = (1 << 63) - 1

_Text = Annotated[str | None, Field(max_length=128, pattern=r"^[!-~]*$")]
_Seconds = Annotated[UnixSeconds | None, Field(ge=0)]


class _LogQuery(BaseModel):
    """The lines to list."""

    actor: _Text = None
    action: _Text = None
    start: _Seconds = None
    end: _Seconds = None
    after: Annotated[int | None, Field(ge=0, le=_MAX_ID)] = None
    limit: Annotated[int, Field(ge=1, le=MAX_LINES)] = 100


class _AllQuery(_LogQuery):
    tenant: _Text = None


class AuditLogLine(Answer):
    """An action. at: Unix seconds.   target: the id or the name of what it was done to.

    actor: `operator`, `gateway` for scheduled work, or `key:` and an API key's id.
    tenant_id: the tenant that owns the target, null where no tenant does.
    """

    object: Literal["audit_log.line"] = "audit_log.line"
    audit_id: int = Field(examples=[812])
    at: int = Field(examples=[1_796_083_200])
    actor: str = Field(examples=["operator"])
    action: str = Field(examples=["tenant.plan"])
    target: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    detail: str = Field(examples=["standard"])
    tenant_id: str | None = Field(examples=["ten_5f0c1d2e3a4b5968"])


class AuditLogPage(Page[AuditLogLine]):
    """A part of the audit log, the newest first."""

    first_id: int | None = Field(examples=[812])
    last_id: int | None = Field(examples=[713])


@router.get("/audit-log")
async def get_own(
    database: DatabaseDep, identity: TenantAdminKey, query: Annotated[_LogQuery, Query()]
) -> AuditLogPage:
    """List what the tenant's API keys did, newest first.

    start, end: Unix seconds.   after: only lines older than the one with this id.
    """
    return await _page(database, query, identity.tenant_id, of_keys=True)


@admin_router.get("/audit-log")
async def get_all(database: DatabaseDep, query: Annotated[_AllQuery, Query()]) -> AuditLogPage:
    """List what was done by the operator and by API keys, newest first.

    tenant: an id or a name; only what was done to that tenant's things.   start, end: Unix seconds.
    after: only lines older than the one with this id.
    """
    tenant_id, tenant = None, query.tenant
    if tenant is not None:
        found = await database.read(lambda conn: tenants.get_tenant(conn, tenant))
        tenant_id = found.tenant_id
    return await _page(database, query, tenant_id)


async def _page(
    database: Database, query: _LogQuery, tenant_id: str | None, *, of_keys: bool = False
) -> AuditLogPage:
    asked = Asked(
        tenant_id=tenant_id,
        of_keys=of_keys,
        actor=query.actor,
        action=query.action,
        start_ms=_milliseconds(query.start),
        end_ms=_milliseconds(query.end),
        after=query.after,
    )
    if asked.start_ms is not None:
        check_order(asked.start_ms, now_ms() + 1 if asked.end_ms is None else asked.end_ms)
    found = await database.read(lambda conn: list_lines(conn, asked, query.limit + 1))
    data = [AuditLogLine.of_record(line) for line in found]
    return AuditLogPage.of(data, lambda line: line.audit_id, query.limit)


def _milliseconds(seconds: int | None) -> int | None:
    return None if seconds is None else seconds * 1000
