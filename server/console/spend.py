"""The page of spend: by day, model, key and kind; the budgets, and when they will be used up."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from server.accounts import auth
from server.accounts.keys import ApiKey, list_keys
from server.api import errors
from server.api.deps import DatabaseDep
from server.billing import budgets
from server.billing.budgets import Budget, BudgetKind, Enforcement, Sums
from server.billing.months import end_of, month_of
from server.billing.rating import format_usd
from server.billing.receipts.rows import COST_KINDS
from server.billing.usage import UsageSum, Which, sum_entries
from server.console.page_route import PageRoute
from server.console.rendering import render
from server.console.viewers import TenantViewer, UsageViewer
from server.database.clock import now_ms

router = APIRouter(route_class=PageRoute)

DAY_MS = 86_400_000
_MOST_GROUPS = 50
_MOST_DAYS = 366
_RATE_DAYS = 7
"""Days of UTC, today the last, whose mean spend says when a budget will be used up."""

Day = Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")]
Name = Annotated[str, Field(max_length=256)]


class Days(BaseModel):
    """Days of UTC, the first and the last; by default the last thirty."""

    model_config = ConfigDict(extra="forbid")

    start: Day = ""
    end: Day = ""

    def range_ms(self, default_days: int = 30) -> tuple[int, int]:
        """[start, end) in Unix milliseconds. Raises ApiError."""
        today = now_ms() // DAY_MS * DAY_MS
        last = _day_ms("end", self.end) if self.end else today
        first = _day_ms("start", self.start) if self.start else last - (default_days - 1) * DAY_MS
        if not 0 <= last - first < _MOST_DAYS * DAY_MS:
            raise errors.invalid_request(
                f"start must be at most {_MOST_DAYS} days before end, and not after it.",
                param="start",
            )
        return first, last + DAY_MS


class SpendQuery(Days):
    """A selection of usage.   model, key: "" for all."""

    model: Name = ""
    key: Name = ""
    by: Literal["model", "key", "kind"] = "model"

    def which(self, tenant_id: str) -> Which:
        return Which(
            tenant_ids=[tenant_id],
            key_ids=[self.key] if self.key else None,
            models=[self.model] if self.model else None,
            kinds=COST_KINDS,
        )


@router.get("")
async def spend(
    viewer: UsageViewer, database: DatabaseDep, query: Annotated[SpendQuery, Query()]
) -> Response:
    """Show what was spent."""
    start_ms, end_ms = query.range_ms()
    tenant_id = viewer.identity.tenant_id
    which = query.which(tenant_id)

    def read(conn: Connection) -> dict[str, Any]:
        days = sum_entries(conn, start_ms, end_ms, ["day"], which)
        groups = sum_entries(conn, start_ms, end_ms, [query.by], which, largest=_MOST_GROUPS)
        return {
            "days": days,
            "groups": groups,
            "total": _total(days),
            "keys": named_keys(conn, viewer),
            "budgets": _budgets(conn, tenant_id),
        }

    found = await database.read(read)
    groups = found.pop("groups")
    return render(
        "spend.html",
        viewer,
        asked=_asked(query, start_ms, end_ms),
        groups=[(group, _narrowed(query, group)) for group in groups],
        is_cut=len(groups) == _MOST_GROUPS,
        models=[group.model for group in groups if group.model],
        plot=plot_of(found["days"], start_ms, end_ms),
        csv_url=f"/console/spend.csv?{urlencode(query.model_dump())}",
        **found,
    )


@router.get("/spend.csv")
async def spend_csv(
    viewer: UsageViewer, database: DatabaseDep, query: Annotated[SpendQuery, Query()]
) -> Response:
    """Get what the page of spend shows, by day and by what it is divided by."""
    start_ms, end_ms = query.range_ms()
    which = query.which(viewer.identity.tenant_id)
    sums = await database.read(
        lambda conn: sum_entries(conn, start_ms, end_ms, ["day", query.by], which)
    )
    text = io.StringIO()
    rows = csv.writer(text)
    counts = ("num_requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    rows.writerow(["day", query.by, *counts, "amount_usd"])
    for total in sums:
        group = _harmless(getattr(total, query.by) or "")
        numbers = [getattr(total, name) for name in counts]
        rows.writerow([day_of(total.at_ms), group, *numbers, format_usd(total.amount_nanousd)])
    name = f"spend-{day_of(start_ms)}-{day_of(end_ms - 1)}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def named_keys(conn: Connection, viewer: TenantViewer) -> list[ApiKey]:
    """The keys that a filter proposes, whose names only an administrator's key may read."""
    return list_keys(conn, viewer.identity.tenant_id) if viewer.may(auth.ADMIN) else []


def day_of(at_ms: int | None) -> str:
    assert at_ms is not None
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d}"


def _day_ms(name: str, day: str) -> int:
    try:
        return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1000
    except ValueError:
        raise errors.invalid_request(
            f"{name} must be a date, like 2026-11-02.", param=name
        ) from None


def _asked(query: SpendQuery, start_ms: int, end_ms: int) -> dict[str, str]:
    return query.model_dump() | {"start": day_of(start_ms), "end": day_of(end_ms - 1)}


def _narrowed(query: SpendQuery, group: UsageSum) -> str | None:
    """The page's URL with one group alone; None where there is no such filter."""
    name = getattr(group, query.by)
    if query.by == "kind" or not name:
        return None
    other = "key" if query.by == "model" else "model"
    return f"/console?{urlencode(query.model_dump() | {query.by: name, 'by': other})}"


def _harmless(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell


def _total(sums: list[UsageSum]) -> UsageSum:
    counts = (
        "num_requests", "prompt_tokens", "cached_tokens", "completion_tokens", "amount_nanousd",
    )  # fmt: skip
    return UsageSum(**{name: sum(getattr(it, name) for it in sums) for name in counts})


def plot_of(days: list[UsageSum], start_ms: int, end_ms: int) -> dict[str, Any]:
    """The plot that `plot.js` draws: dollars by day, 0 on days without usage."""
    by_day = {it.at_ms: it.amount_nanousd / 1e9 for it in days}
    starts = range(start_ms, min(end_ms, now_ms() + 1), DAY_MS)
    values = [by_day.get(start, 0) for start in starts]
    return {
        "x": [start // 1000 for start in starts],
        "series": [{"label": "spent", "values": values}],
        "unit": "$",
    }


# ---- budgets ----


@dataclass(frozen=True, slots=True)
class _BudgetView:
    """A budget as the page shows it.   used_share: in [0, 1].   forecast: a sentence."""

    kind: BudgetKind
    enforcement: Enforcement
    given_nanousd: int
    remaining_nanousd: int
    held_nanousd: int
    used_share: float
    forecast: str


def _budgets(conn: Connection, tenant_id: str) -> list[_BudgetView]:
    found = budgets.get_budgets(conn, tenant_id)
    if not found:
        return []
    at_ms = now_ms()
    sums = budgets.read_sums(conn, tenant_id, at_ms)
    which = Which(tenant_ids=[tenant_id], kinds=COST_KINDS)
    # Whole days are read from sums by day: the hours of a large tenant are thousands of rows.
    end_ms = (at_ms // DAY_MS + 1) * DAY_MS
    start_ms = end_ms - _RATE_DAYS * DAY_MS
    lately = sum_entries(conn, start_ms, end_ms, which=which)[0].amount_nanousd
    daily_nanousd = lately * DAY_MS / (at_ms - start_ms)
    return [_budget(budget, sums, daily_nanousd, at_ms) for budget in found]


def _budget(budget: Budget, sums: Sums, daily_nanousd: float, at_ms: int) -> _BudgetView:
    remaining = sums.remaining(budget.kind, budget.amount_nanousd)
    given = budget.amount_nanousd
    if budget.kind == "prepaid":
        given = max(sums.balance_nanousd - budget.amount_nanousd, 0)
    used_share = 1 - min(max(remaining / given, 0), 1) if given else 1.0
    forecast = " ".join(_forecast(budget.kind, remaining, daily_nanousd, at_ms))
    return _BudgetView(
        budget.kind, budget.enforcement, given, remaining, sums.held_nanousd, used_share, forecast
    )


def _forecast(
    kind: BudgetKind, remaining_nanousd: int, daily_nanousd: float, at_ms: int
) -> Iterator[str]:
    """Yield the sentences that say when a budget will be used up."""
    if remaining_nanousd <= 0:
        yield "It is used up."
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
