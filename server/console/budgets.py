"""Budgets on the page of spend: what is left of each, and when it will be used up."""

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection

from server.api.endpoints.budgets import BudgetAnswer
from server.billing.budgets import BudgetKind
from server.billing.months import end_of, month_of
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import Selection, sum_entries
from server.database.clock import now_ms
from server.text.times import DAY_MS, day_of

_RATE_DAYS = 7
"""Days whose mean spend says when a budget will be used up."""


def with_forecasts(
    conn: Connection, tenant_id: str, found: Sequence[BudgetAnswer]
) -> list[tuple[BudgetAnswer, float | None, Iterator[str]]]:
    """(budget, used share, sentences of its forecast) of each of a tenant's budgets.

    The share is in [0, 1], and None of a prepaid one, as nobody knows what its credit was once.
    """
    if not found:
        return []
    at_ms = now_ms()
    only = Selection(tenant_ids=[tenant_id], kinds=SPEND_KINDS)
    # Whole days are read from sums by day: the hours of a large tenant are thousands of rows.
    end_ms = (at_ms // DAY_MS + 1) * DAY_MS
    start_ms = end_ms - _RATE_DAYS * DAY_MS
    lately = sum_entries(conn, start_ms, end_ms, only=only)[0].amount_nanousd
    daily_nanousd = lately * DAY_MS / (at_ms - start_ms)
    return [
        (it, _used_share(it), forecast_of(it.kind, it.remaining_nanousd, daily_nanousd, at_ms))
        for it in found
    ]


def _used_share(budget: BudgetAnswer) -> float | None:
    if budget.kind == "prepaid":
        return None
    given, remaining = budget.amount_nanousd, budget.remaining_nanousd
    return 1 - min(max(remaining / given, 0), 1) if given else 1.0


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
