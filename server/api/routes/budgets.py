"""Budgets: operators set them, and tenants see how much of them is left."""

from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from server.accounts import tenants
from server.api import errors
from server.api.bodies import json_body
from server.api.deps import DatabaseDep, IdentitiesDep, UsageKey
from server.billing import budgets
from server.billing.budgets import Budget, BudgetKind, Enforcement, Sums
from server.billing.months import end_of, month_of
from server.billing.rating import format_usd
from server.database.clock import now_ms
from server.text.json_object import JsonObject

router = APIRouter()
admin_router = APIRouter()


Dollars = Annotated[str, Field(pattern=r"^[0-9]{1,7}(\.[0-9]{1,9})?$")]
"""An amount of dollars below ten millions, with nine decimals at most."""


class _Amount(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: Dollars


@router.get("/budgets")
async def list_budgets(database: DatabaseDep, identity: UsageKey) -> JsonObject:
    """List the tenant's budgets, with what is held and what remains of each."""
    return await database.read(lambda conn: _list(conn, identity.tenant_id))


@admin_router.get("/tenants/{tenant}/budgets")
async def list_budgets_of(tenant: str, database: DatabaseDep) -> JsonObject:
    """List a tenant's budgets, with what is held and what remains of each."""
    return await database.read(lambda conn: _list(conn, tenants.get_tenant(conn, tenant).tenant_id))


@admin_router.get("/tenants/{tenant}/budgets/{kind}/{enforcement}")
async def get_budget(
    tenant: str, kind: BudgetKind, enforcement: Enforcement, database: DatabaseDep
) -> JsonObject:
    """Get one of a tenant's budgets, with what is held and what remains of it."""
    return await database.read(lambda conn: _get(conn, tenant, kind, enforcement))


@admin_router.put("/tenants/{tenant}/budgets/{kind}/{enforcement}")
async def set_budget(
    tenant: str,
    kind: BudgetKind,
    enforcement: Enforcement,
    body: Annotated[_Amount, json_body(_Amount)],
    database: DatabaseDep,
    identities: IdentitiesDep,
) -> JsonObject:
    """Set one of a tenant's budgets.

    The budget holds from the next request on, at the other gateways within two seconds.
    """

    def write(conn: Connection) -> tuple[str, JsonObject]:
        budget = Budget(
            tenant_id=tenants.get_tenant(conn, tenant).tenant_id,
            kind=kind,
            enforcement=enforcement,
            amount_nanousd=nanousd(body.amount),
        )
        budgets.set_budget(conn, budget, now_ms=now_ms())
        return budget.tenant_id, _get(conn, budget.tenant_id, kind, enforcement)

    tenant_id, shown = await database.write(write)
    identities.forget(tenant_id)
    return shown


@admin_router.delete("/tenants/{tenant}/budgets/{kind}/{enforcement}")
async def remove_budget(
    tenant: str,
    kind: BudgetKind,
    enforcement: Enforcement,
    database: DatabaseDep,
    identities: IdentitiesDep,
) -> JsonObject:
    """Remove one of a tenant's budgets."""

    def write(conn: Connection) -> str:
        tenant_id = tenants.get_tenant(conn, tenant).tenant_id
        if not budgets.remove_budget(conn, tenant_id, kind, enforcement, now_ms=now_ms()):
            raise _not_found()
        return tenant_id

    identities.forget(await database.write(write))
    return {"object": "budget.deleted", "deleted": True}


def nanousd(amount: Dollars) -> int:
    return int(Decimal(amount) * 10**9)


def _list(conn: Connection, tenant_id: str) -> JsonObject:
    at_ms = now_ms()
    sums = budgets.read_sums(conn, tenant_id, at_ms)
    found = budgets.get_budgets(conn, tenant_id)
    data = [_budget(budget, sums, at_ms) for budget in found]
    return {"object": "list", "data": data, "has_more": False}


def _get(conn: Connection, tenant: str, kind: BudgetKind, enforcement: Enforcement) -> JsonObject:
    listed: list[JsonObject] = _list(conn, tenants.get_tenant(conn, tenant).tenant_id)["data"]
    for budget in listed:
        if (budget["kind"], budget["enforcement"]) == (kind, enforcement):
            return budget
    raise _not_found()


def _not_found() -> errors.ApiError:
    return errors.not_found("There is no such budget.", code="budget_not_found", param="kind")


def _budget(budget: Budget, sums: Sums, at_ms: int) -> JsonObject:
    """A budget. A monthly one has what was `spent` in the month, a prepaid one the `balance`.

    status: whether the budget stops requests now.
    """
    remaining = sums.remaining(budget.kind, budget.amount_nanousd)
    is_enforcing = budget.enforcement == "hard" and remaining <= 0
    amounts = {"amount": budget.amount_nanousd, "held": sums.held_nanousd, "remaining": remaining}
    if budget.kind == "monthly":
        amounts["spent"] = sums.spent_nanousd
    else:
        amounts["balance"] = sums.balance_nanousd
    shown: JsonObject = {
        "object": "budget",
        "tenant_id": budget.tenant_id,
        "kind": budget.kind,
        "enforcement": budget.enforcement,
        "status": "enforcing" if is_enforcing else "inactive",
        "resets_at": end_of(month_of(at_ms)) // 1000 if budget.kind == "monthly" else None,
    }
    for name, nanousd in amounts.items():
        shown |= {name: format_usd(nanousd), f"{name}_nanousd": nanousd}
    return shown
