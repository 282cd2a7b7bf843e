"""The page of spend: by day, model, key and kind, beside the budgets; and the same as CSV."""

import csv
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Response
from fastapi.responses import RedirectResponse
from pydantic import Field
from sqlalchemy import Connection

from server.accounts import auth
from server.accounts.keys import list_keys
from server.accounts.lineage import ApiKey
from server.api.accounts import Account
from server.api.deps import DatabaseDep
from server.api.endpoints.budgets import list_budgets
from server.billing.rating import format_usd
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import Selection, UsageSum, sum_entries
from server.console.budgets import with_forecasts
from server.console.days import Days
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import AnyTenant, TenantViewer, UsageViewer
from server.text.times import DAY_MS, day_of

router = pages_router()

_MOST_GROUPS = 50
_MOST_SERIES = 5
"""Groups that the plot tells apart; the rest of a day is one series."""

Name = Annotated[str, Field(max_length=256)]


class SpendQuery(Days):
    """A question about usage.   model, key: "" for all.   plot: what its bars stand for."""

    model: Name = ""
    key: Name = ""
    by: Literal["model", "key", "kind"] = "model"
    plot: Literal["spend", "tokens"] = "spend"

    def selection(self, tenant_id: str) -> Selection:
        return Selection(
            tenant_ids=[tenant_id],
            key_ids=[self.key] if self.key else None,
            models=[self.model] if self.model else None,
            kinds=SPEND_KINDS,
        )


@router.get("")
async def spend(
    viewer: AnyTenant, database: DatabaseDep, query: Annotated[SpendQuery, Query()]
) -> Response:
    """Show what was spent, or lead a viewer who may not see it to the first page for it."""
    if not viewer.may(auth.USAGE_READ):
        return RedirectResponse(viewer.home, 303)
    start_ms, end_ms = query.range_ms()
    tenant_id = viewer.identity.tenant_id
    only = query.selection(tenant_id)
    given = (await list_budgets(Account(tenant_id), database)).data

    def read(conn: Connection) -> dict[str, Any]:
        days = sum_entries(conn, start_ms, end_ms, ["day"], only)
        groups = sum_entries(conn, start_ms, end_ms, [query.by], only, largest=_MOST_GROUPS)
        names = [name for it in groups[:_MOST_SERIES] if (name := getattr(it, query.by))]
        if narrowed := _of_groups(query, only, names):
            parts = sum_entries(conn, start_ms, end_ms, ["day", query.by], narrowed)
            series = {name: [it for it in parts if getattr(it, query.by) == name] for name in names}
        else:
            series = {}
        return {
            "days": days,
            "groups": groups,
            "plot": plot_of(days, start_ms, end_ms, series, query.plot),
            "total": _total(days),
            "keys": named_keys(conn, viewer),
            "budgets": with_forecasts(conn, tenant_id, given),
        }

    found = await database.read(read)
    groups = found.pop("groups")
    return render(
        "spend.html",
        viewer,
        asked=query.asked(),
        groups=[(group, _narrowed(query, group)) for group in groups],
        is_cut=len(groups) == _MOST_GROUPS,
        models=[group.model for group in groups if group.model],
        csv_url=f"/console/spend.csv?{urlencode(query.model_dump())}",
        **found,
    )


@router.get("/spend.csv")
async def spend_csv(
    viewer: UsageViewer, database: DatabaseDep, query: Annotated[SpendQuery, Query()]
) -> Response:
    """Get what the page of spend shows, by day and by what it is divided by."""
    start_ms, end_ms = query.range_ms()
    only = query.selection(viewer.identity.tenant_id)
    sums = await database.read(
        lambda conn: sum_entries(conn, start_ms, end_ms, ["day", query.by], only)
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


def _of_groups(query: SpendQuery, only: Selection, names: Sequence[str]) -> Selection | None:
    """The selection of these groups alone; None if there is a filter on another dimension, since
    sums by day are kept of one dimension at a time.
    """
    filters = {name for name in ("model", "key") if getattr(query, name)}
    if not names or filters - {query.by}:
        return None
    match query.by:
        case "model":
            return replace(only, models=None, names=names)
        case "key":
            return replace(only, key_ids=names)
        case "kind":
            return only


def plot_of(
    days: Sequence[UsageSum],
    start_ms: int,
    end_ms: int,
    groups: Mapping[str, Sequence[UsageSum]] = MappingProxyType({}),
    plot: Literal["spend", "tokens"] = "spend",
) -> dict[str, Any]:
    """The stacked bars that `plot.js` draws: a series for each group, and one for the rest.

    days: sums by day of all groups.   groups: sums by day of some, by name. A name has its hue, in
    degrees, whatever else is shown; the rest has none.
    """
    starts = range(start_ms, end_ms, DAY_MS)

    def values(sums: Sequence[UsageSum]) -> list[int]:
        """A number for each day, 0 without usage; of money in nano-dollars, which add up."""
        by_day = {
            it.at_ms: it.amount_nanousd
            if plot == "spend"
            else it.prompt_tokens + it.completion_tokens
            for it in sums
        }
        return [by_day.get(start, 0) for start in starts]

    series = {name: values(sums) for name, sums in groups.items()}
    rest = [
        total - sum(parts) for total, *parts in zip(values(days), *series.values(), strict=True)
    ]
    if any(rest) or not series:
        series["all others" if series else plot] = rest
    unit = 1e9 if plot == "spend" else 1
    return {
        "x": [start // 1000 for start in starts],
        "series": [
            {
                "label": name,
                "values": [number / unit for number in numbers],
                "hue": zlib.crc32(name.encode()) % 360 if name in groups else None,
            }
            for name, numbers in series.items()
        ],
        "unit": "$" if plot == "spend" else "",
    }
