"""Tenants with what each spends, asks and has, a page at a time, for the operator.

The order by spend looks at one row of every tenant; all other figures are read for a page's tenants
alone, each by an index that begins with the tenant.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.tables import adapters
from server.accounts.keys import is_live
from server.accounts.tables import api_keys, tenants
from server.accounts.tenants import Tenant, TenantStatus
from server.billing.budgets import Budget, get_budgets
from server.billing.months import month_of
from server.billing.tables import monthly_spend
from server.billing.usage import WIDTH_MS, Selection, UsageSum, sum_entries

Order = Literal["spend", "name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures(Tenant):
    """A tenant and its figures.

    spent_nanousd: in this UTC month.   num_requests: since the beginning of the hour that was 24
    hours ago.   num_failed: those of them that the server answered with an error.
    num_keys: keys that can be used.
    """

    spent_nanousd: int
    num_requests: int
    num_failed: int
    num_adapters: int
    num_keys: int
    budgets: Sequence[Budget]


def list_tenant_figures(
    conn: Connection,
    *,
    now_ms: int,
    tenant_id: str | None = None,
    part: str = "",
    status: TenantStatus | None = None,
    order: Order = "spend",
    limit: int,
    offset: int = 0,
) -> list[TenantFigures]:
    """Read a page of tenants.   tenant_id: that one alone.   part: of their names.   order: by the
    most spend, or by name.
    """
    spent = sa.func.coalesce(monthly_spend.c.amount_nanousd, 0).label("spent_nanousd")
    is_of_month = (monthly_spend.c.tenant_id == tenants.c.tenant_id) & (
        monthly_spend.c.month == month_of(now_ms)
    )
    query = sa.select(tenants, spent).outerjoin(monthly_spend, is_of_month)
    if tenant_id is not None:
        query = query.where(tenants.c.tenant_id == tenant_id)
    if part:
        query = query.where(tenants.c.name.contains(part, autoescape=True))
    if status is not None:
        query = query.where(tenants.c.status == status)
    places = (spent.desc(), tenants.c.name) if order == "spend" else (tenants.c.name,)
    found = conn.execute(query.order_by(*places).limit(limit).offset(offset)).mappings().all()
    tenant_ids = [row["tenant_id"] for row in found]
    begin_ms = now_ms - WIDTH_MS["day"]
    begin_ms -= begin_ms % WIDTH_MS["hour"]
    only = Selection(tenant_ids=tenant_ids, kinds=["usage"])
    sums = {it.tenant: it for it in sum_entries(conn, begin_ms, now_ms, ["tenant"], only)}
    usage = {tenant_id: sums.get(tenant_id, UsageSum()) for tenant_id in tenant_ids}
    num_adapters = _counts(conn, adapters, tenant_ids, adapters.c.deleted_at_ms.is_(None))
    num_keys = _counts(conn, api_keys, tenant_ids, is_live(now_ms))
    given: dict[str, list[Budget]] = defaultdict(list)
    for budget in get_budgets(conn, tenant_ids):
        given[budget.tenant_id].append(budget)
    return [
        TenantFigures(
            **row,
            num_requests=usage[tenant_id].num_requests + usage[tenant_id].num_failed_requests,
            num_failed=usage[tenant_id].num_failed_requests,
            num_adapters=num_adapters.get(tenant_id, 0),
            num_keys=num_keys.get(tenant_id, 0),
            budgets=given[tenant_id],
        )
        for tenant_id, row in zip(tenant_ids, found, strict=True)
    ]


def _counts(
    conn: Connection, table: sa.Table, tenant_ids: Sequence[str], condition: sa.ColumnElement[bool]
) -> dict[str, int]:
    """{tenant_id: rows that meet the condition}, without tenants that have none."""
    owner = table.c.tenant_id
    query = sa.select(owner, sa.func.count()).where(owner.in_(tenant_ids), condition)
    return {tenant_id: number for tenant_id, number in conn.execute(query.group_by(owner))}
