"""Sends tenants a webhook event when a budget passes a threshold or a hard budget is used up.

Posted entries decide, not open holds: requests under way may cost less than they hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.months import month_of
from server.billing.rating import format_usd
from server.billing.tables import budgets, monthly_spend, tenant_accounts
from server.database.clock import now_ms
from server.database.database import Database
from server.webhooks.events import EventType, insert_event, new_event
from server.webhooks.tables import webhook_events, webhooks

INTERVAL_S = 5.0
REACHED: EventType = "budget.threshold_reached"
EXHAUSTED: EventType = "budget.exhausted"
_PERCENTAGES = (50, 80, 100)
"""The thresholds of a monthly budget, of which the highest that is reached is told."""
_PAGE_SIZE = 1000
"""Budgets in one read. A tenant has at most four, so a page covers 250 tenants or more."""

_Place = tuple[str, str, str]
_BEGINNING: _Place = ("", "", "")


@dataclass(frozen=True, slots=True)
class _Standing:
    """The state of one budget of a tenant with a webhook.

    subject: subject of the budget's event, which keeps it from being sent twice. For a monthly
    one it names month, amount and threshold; for a prepaid one it stays while the balance is low.
    """

    tenant_id: str
    type: EventType
    subject: str
    is_reached: bool
    data: dict[str, Any]


class BudgetWatch:
    """The chore that checks the budgets of all tenants that have a webhook."""

    def __init__(self, database: Database, clock: Callable[[], int] = now_ms) -> None:
        self._database = database
        self._clock = clock

    async def turn(self) -> int:
        """Check all budgets and return the number of new events. Raises LedgerUnavailable."""
        at_ms, count, after = self._clock(), 0, _BEGINNING
        while True:
            changes = partial(_changes, after=after, at_ms=at_ms)
            page, after = await self._database.read(changes)
            if page:
                count += await self._database.write(partial(_write, changed=page, at_ms=at_ms))
            if after == _BEGINNING:
                return count


def _changes(conn: Connection, *, after: _Place, at_ms: int) -> tuple[list[_Standing], _Place]:
    """Return the budgets of a page whose state has changed, and the place of the next page."""
    month = month_of(at_ms)
    budget, spend, account = budgets.c, monthly_spend.c, tenant_accounts.c
    of_month = (spend.tenant_id == budget.tenant_id) & (spend.month == month)
    key = sa.tuple_(budget.tenant_id, budget.kind, budget.enforcement)
    query = (
        sa.select(
            budgets,
            sa.func.coalesce(spend.amount_nanousd, 0).label("spent_nanousd"),
            sa.func.coalesce(account.balance_nanousd, 0).label("balance_nanousd"),
        )
        .join(webhooks, webhooks.c.tenant_id == budget.tenant_id)
        .outerjoin(monthly_spend, of_month)
        .outerjoin(tenant_accounts, account.tenant_id == budget.tenant_id)
        .where(key > sa.tuple_(*after), webhooks.c.is_enabled)
        .order_by(*key)
        .limit(_PAGE_SIZE)
    )
    rows = conn.execute(query).all()
    standings = [standing for row in rows for standing in _standings(row, month)]
    known = _known(conn, standings)
    changed = [
        standing
        for standing in standings
        if ((standing.tenant_id, standing.type, standing.subject) in known) != standing.is_reached
    ]
    is_last = len(rows) < _PAGE_SIZE
    last = rows[-1] if not is_last else None
    return changed, (last.tenant_id, last.kind, last.enforcement) if last else _BEGINNING


def _standings(row: sa.Row[Any], month: str) -> list[_Standing]:
    """Return what a budget's events depend on, of a monthly budget only what is reached."""
    is_monthly, is_hard = row.kind == "monthly", row.enforcement == "hard"
    left = row.amount_nanousd - row.spent_nanousd
    if not is_monthly:
        left = row.balance_nanousd - row.amount_nanousd
    subject = f"{row.kind} {row.enforcement}"
    data = {
        "tenant_id": row.tenant_id,
        "kind": row.kind,
        "enforcement": row.enforcement,
        "amount_nanousd": row.amount_nanousd,
        "amount": format_usd(row.amount_nanousd),
    }
    standing, found = partial(_Standing, row.tenant_id), []
    if is_monthly:
        subject += f" {month} {row.amount_nanousd}"
        data |= {"month": month, "spent_nanousd": row.spent_nanousd}
        reached = [p for p in _PERCENTAGES if row.spent_nanousd * 100 >= row.amount_nanousd * p]
        for percent in reached[-1:]:
            found += [standing(REACHED, f"{subject} {percent}%", True, data | {"percent": percent})]
    else:
        data |= {"balance_nanousd": row.balance_nanousd}
        found += [] if is_hard else [standing(REACHED, subject, left < 0, data)]
    if is_hard:
        data |= {"needed_nanousd": row.needed_nanousd}
        found += [standing(EXHAUSTED, subject, left < row.needed_nanousd, data)]
    return [one for one in found if one.is_reached or not is_monthly]


def _known(conn: Connection, standings: Sequence[_Standing]) -> set[tuple[str, str, str]]:
    columns = webhook_events.c
    query = sa.select(columns.tenant_id, columns.type, columns.subject).where(
        columns.tenant_id.in_({standing.tenant_id for standing in standings}),
        columns.subject.in_({standing.subject for standing in standings}),
    )
    return {(row.tenant_id, row.type, row.subject) for row in conn.execute(query)}


def _write(conn: Connection, *, changed: Sequence[_Standing], at_ms: int) -> int:
    """Insert an event for each budget that is reached, and return how many are new.

    If a prepaid budget is no longer reached, its event is renamed, so that a new one can be sent.
    """
    count = 0
    for standing in changed:
        if standing.is_reached:
            about, subject = (standing.tenant_id, standing.type, standing.data), standing.subject
            count += insert_event(conn, new_event(*about, now_ms=at_ms, subject=subject))
        elif standing.data["kind"] == "prepaid":
            update = sa.update(webhook_events).filter_by(
                tenant_id=standing.tenant_id, type=standing.type, subject=standing.subject
            )
            conn.execute(update.values(subject=f"{standing.subject} until {at_ms}"))
    return count
