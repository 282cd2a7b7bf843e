"""Budgets: operators set them, and tenants see how much of them is left."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.errors import Fault, NotFound
from server.accounts.auth import USAGE_READ
from server.api.accounts import AccountDep, AccountEndpoints, RowsDep
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import DatabaseDep
from server.billing import budgets
from server.billing.budgets import Budget, BudgetKind, Enforcement, Sums
from server.billing.months import end_of, month_of
from server.billing.rating import format_usd
from server.database.clock import now_ms

both = AccountEndpoints()


Dollars = Annotated[str, Field(pattern=r"^[0-9]{1,7}(\.[0-9]{1,9})?$")]
"""An amount of dollars below ten millions, with nine decimals at most."""


class _Amount(BodyFields):
    """The amount of a budget. amount: dollars in digits, such as 12.5."""

    amount: Dollars


class _BudgetAnswer(Answer):
    """A budget. Each amount is in dollars, and the same in nano-dollars.

    held: what open requests hold.   remaining: what the tenant may still spend.   status: enforcing
    while a hard budget does not cover the smallest request that it refused lately.
    """

    object: Literal["budget"] = "budget"
    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    enforcement: Enforcement
    status: Literal["enforcing", "inactive"]
    amount: str = Field(examples=["12.500000000"])
    amount_nanousd: int = Field(examples=[12_500_000_000])
    held: str = Field(examples=["0.000120000"])
    held_nanousd: int = Field(examples=[120_000])
    remaining: str = Field(examples=["12.250000000"])
    remaining_nanousd: int = Field(examples=[12_250_000_000])


class MonthlyBudget(_BudgetAnswer):
    """A budget of one UTC month.   resets_at: the month's end, in Unix seconds."""

    kind: Literal["monthly"] = "monthly"
    resets_at: int = Field(examples=[1_798_761_600])
    spent: str = Field(examples=["0.249880000"])
    spent_nanousd: int = Field(examples=[249_880_000])


class PrepaidBudget(_BudgetAnswer):
    """A budget of what the tenant paid in advance."""

    kind: Literal["prepaid"] = "prepaid"
    resets_at: None = None
    balance: str = Field(examples=["12.250120000"])
    balance_nanousd: int = Field(examples=[12_250_120_000])


BudgetAnswer = Annotated[MonthlyBudget | PrepaidBudget, Field(discriminator="kind")]


class BudgetList(ListAnswer[BudgetAnswer]):
    """All budgets of a tenant."""


class BudgetDeleted(Answer):
    """The answer to the removal of a budget."""

    object: Literal["budget.deleted"] = "budget.deleted"
    deleted: Literal[True] = True


@both("GET", "/budgets", USAGE_READ, name="list_budgets_of")
async def list_budgets(account: AccountDep, database: DatabaseDep) -> BudgetList:
    """List the tenant's budgets, with what is held and what remains of each."""
    return await database.read(lambda conn: _list(conn, account.tenant_id(conn)))


@both.operators("GET", "/budgets/{kind}/{enforcement}")
async def get_budget(kind: BudgetKind, enforcement: Enforcement, rows: RowsDep) -> BudgetAnswer:
    """Get one of a tenant's budgets, with what is held and what remains of it."""
    return await rows.read(lambda conn, tenant_id: _get(conn, tenant_id, kind, enforcement))


@both.operators("PUT", "/budgets/{kind}/{enforcement}")
async def set_budget(
    kind: BudgetKind,
    enforcement: Enforcement,
    rows: RowsDep,
    body: Annotated[_Amount, json_body(_Amount)],
) -> BudgetAnswer:
    """Set one of a tenant's budgets.

    The budget holds from the next request on, at the other gateways within two seconds.
    """

    def write(conn: Connection, tenant_id: str) -> BudgetAnswer:
        put_budget(conn, tenant_id, kind, enforcement, body.amount)
        return _get(conn, tenant_id, kind, enforcement)

    return await rows.write(write)


@both.operators("DELETE", "/budgets/{kind}/{enforcement}")
async def remove_budget(kind: BudgetKind, enforcement: Enforcement, rows: RowsDep) -> BudgetDeleted:
    """Remove one of a tenant's budgets."""
    if not await rows.write(
        lambda conn, tenant_id: put_budget(conn, tenant_id, kind, enforcement, None)
    ):
        raise _not_found()
    return BudgetDeleted()


def put_budget(
    conn: Connection,
    tenant_id: str,
    kind: BudgetKind,
    enforcement: Enforcement,
    amount: Dollars | None,
) -> bool:
    """Set a budget, or remove it where the amount is None. Returns False if there was none."""
    if amount is None:
        return budgets.remove_budget(conn, tenant_id, kind, enforcement, now_ms=now_ms())
    budget = Budget(
        tenant_id=tenant_id, kind=kind, enforcement=enforcement, amount_nanousd=nanousd(amount)
    )
    budgets.set_budget(conn, budget, now_ms=now_ms())
    return True


def nanousd(amount: Dollars) -> int:
    return int(Decimal(amount) * 10**9)


def _list(conn: Connection, tenant_id: str) -> BudgetList:
    at_ms = now_ms()
    sums = budgets.read_sums(conn, tenant_id, at_ms)
    found = budgets.get_budgets(conn, [tenant_id])
    return BudgetList(data=[_budget(budget, sums, at_ms) for budget in found])


def _get(
    conn: Connection, tenant_id: str, kind: BudgetKind, enforcement: Enforcement
) -> BudgetAnswer:
    for budget in _list(conn, tenant_id).data:
        if (budget.kind, budget.enforcement) == (kind, enforcement):
            return budget
    raise _not_found()


def _not_found() -> Fault:
    return NotFound("There is no such budget.", code="budget_not_found", param="kind")


def _budget(budget: Budget, sums: Sums, at_ms: int) -> BudgetAnswer:
    remaining = sums.remaining(budget.kind, budget.amount_nanousd)
    is_enforcing = budget.enforcement == "hard" and remaining < budget.needed_nanousd
    shown = {
        "tenant_id": budget.tenant_id,
        "enforcement": budget.enforcement,
        "status": "enforcing" if is_enforcing else "inactive",
        **_amount("amount", budget.amount_nanousd),
        **_amount("held", sums.held_nanousd),
        **_amount("remaining", remaining),
    }
    if budget.kind == "prepaid":
        return PrepaidBudget(**shown, **_amount("balance", sums.balance_nanousd))
    resets_at = end_of(month_of(at_ms)) // 1000
    return MonthlyBudget(**shown, resets_at=resets_at, **_amount("spent", sums.spent_nanousd))


def _amount(name: str, nanousd: int) -> dict[str, Any]:
    return {name: format_usd(nanousd), f"{name}_nanousd": nanousd}
