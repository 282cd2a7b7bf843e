"""Deletes holds that nobody reads any more; without it a fifth of the ledger would be holds.

Only open holds count for budgets, seats, cancelling, statements and pending receipts. What a posted
hold knew is in its event and in its receipt. These readers remain:

- The audit compares a hold with its event, so a posted hold stays until a daily audit has seen it.
- A simulation looks for the note that a request failed, so holds with this note stay.
- A voided hold prices an end record that its engine delivers after all, when a journal that was
  lost turns up; this is an incident, and such a hold stays with its event.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.holds import HoldState
from server.billing.tables import IS_RESOLVED_HOLD, holds, usage_events
from server.database.clock import database_now_ms
from server.database.database import Database

DAY_MS = 86_400_000
KEPT_MS: dict[HoldState, int] = {"posted": 2 * DAY_MS, "voided": 30 * DAY_MS}
"""Ages, since it was posted or voided, at which a hold is deleted."""
MAX_AT_ONCE = 1000
"""Holds in one transaction."""
INTERVAL_S = 60.0


async def delete_old_holds(database: Database, at_ms: int | None = None) -> None:
    """A chore: delete every hold that is old enough, now or at a time. Raises LedgerUnavailable."""
    for state, kept_ms in KEPT_MS.items():

        def delete(conn: Connection, state: HoldState = state, kept_ms: int = kept_ms) -> int:
            return delete_old(conn, state, (at_ms or database_now_ms(conn)) - kept_ms)

        while await database.write(delete) == MAX_AT_ONCE:
            pass


def delete_old(conn: Connection, state: HoldState, before_ms: int) -> int:
    """Delete a batch of the oldest holds that ended in `state` before a time; return how many."""
    hold = holds.c
    is_old = IS_RESOLVED_HOLD & (hold.state == state) & (hold.resolved_at_ms < before_ms)
    if state == "voided":
        is_old &= ~sa.exists().where(usage_events.c.request_id == hold.request_id)
    old = sa.select(hold.request_id).where(is_old).order_by(hold.resolved_at_ms).limit(MAX_AT_ONCE)
    # A row that another transaction has locked is being changed, so it waits for the next turn.
    old = old.with_for_update(skip_locked=True, of=holds)
    return conn.execute(sa.delete(holds).where(hold.request_id.in_(old))).rowcount
