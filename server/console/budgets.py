"""Budgets on the page of spend: what is left of each, and when it will be used up."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection

from server.billing import budgets
from server.billing.budgets import Budget, BudgetKind, Enforcement, Sums
from server.billing.months import end_of, month_of
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import Which, sum_entries
from server.console.days import DAY_MS
from server.database.clock import now_ms
from server.text.times import day_of

_RATE_DAYS = 7
"""Days whose mean spend says when a budget will be used up."""


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget as the page shows it.   forecast: a sentence.

    used_share: in [0, 1]; None of a prepaid one, as nobody knows what its credit was once.
    """

    kind: BudgetKind
    enforcement: Enforcement
    amount_nanousd: int
    remaining_nanousd: int
    held_nanousd: int
    used_share: float | None
    forecast: str


def list_budgets(conn: Connection, tenant_id: str) -> list[BudgetView]:
    found = budgets.get_budgets(conn, [tenant_id])
    if not found:
        return []
    at_ms = now_ms()
    sums = budgets.read_sums(conn, tenant_id, at_ms)
    which = Which(tenant_ids=[tenant_id], kinds=SPEND_KINDS)
    # Whole days are read from sums by day: the hours of a large tenant are thousands of rows.
    end_ms = (at_ms // DAY_MS + 1) * DAY_MS
    start_ms = end_ms - _RATE_DAYS * DAY_MS
    lately = sum_entries(conn, start_ms, end_ms, which=which)[0].amount_nanousd
    daily_nanousd = lately * DAY_MS / (at_ms - start_ms)
    return [_budget(budget, sums, daily_nanousd, at_ms) for budget in found]


def _budget(budget: Budget, sums: Sums, daily_nanousd: float, at_ms: int) -> BudgetView:
    remaining = sums.remaining(budget.kind, budget.amount_nanousd)
    given, used_share = budget.amount_nanousd, None
    if budget.kind == "monthly":
        used_share = 1 - min(max(remaining / given, 0), 1) if given else 1.0
    forecast = " ".join(forecast_of(budget.kind, remaining, daily_nanousd, at_ms))
    return BudgetView(
        budget.kind, budget.enforcement, given, remaining, sums.held_nanousd, used_share, forecast
    )


def forecast_of(
    kind: BudgetKind, remaining_nanousd: int, daily_nanousd: float, at_ms: int
) -> Iterator[str]:
    """Yield the sentences that say when a budget will be used up."""
    if remaining_nanousd <= 0:
        yield "Nothing is left of it."
    elif daily_nanousd <= 0:
        yield f"Nothing was spent in the last {_RATE_DAYS} days."
    else:
        ends_ms = at_ms + remaining_nanousd / daily_nanousd * DAY_MS
        month_ends_ms = end_of(month_of(at_ms))
        if kind == "monthly" and ends_ms >= month_ends_ms:
            yield f"At the pace of the last {_RATE_DAYS} days it lasts until the month ends."
        elif ends_ms > at_ms + 3650 * DAY_MS:
            yield f"At the pace of the last {_RATE_DAYS} days it lasts for more than ten years."
        else:
            day = day_of(int(ends_ms))
            yield f"At the pace of the last {_RATE_DAYS} days it will be used up on {day}."
    if kind == "monthly":
        yield f"The next month's begins on {day_of(end_of(month_of(at_ms)))}."
