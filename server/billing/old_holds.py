"""Deletes holds that nobody reads any more; without it a fifth of the ledger would be holds.

Only open holds count for budgets, seats, cancelling, statements and pending receipts. What a posted
hold knew is in its event and in its receipt. A daily audit compares the two, so it stays two days.
Two kinds stay for good, since they are few: a failed request's hold has a note that simulations
look for, and a voided hold prices an end record that its engine delivers after all.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.tables import IS_PAST_HOLD, holds
from server.database.clock import database_now_ms
from server.database.database import Database
from server.text.times import DAY_MS

KEPT_MS = 2 * DAY_MS
"""Age, since it was posted, at which a hold is deleted."""
MAX_AT_ONCE = 1000
"""Holds in one transaction."""


async def delete_old_holds(database: Database, at_ms: int | None = None) -> None:
    """A chore: delete every hold that is old enough, now or at a time. Raises LedgerUnavailable."""

    hold = holds.c

    def delete(conn: Connection) -> int:
        before_ms = (at_ms or database_now_ms(conn)) - KEPT_MS
        old = sa.select(hold.request_id).where(IS_PAST_HOLD, hold.resolved_at_ms < before_ms)
        # A row that another transaction has locked is being changed, so it waits for the next turn.
        old = old.order_by(hold.resolved_at_ms).limit(MAX_AT_ONCE).with_for_update(skip_locked=True)
        return conn.execute(sa.delete(holds).where(hold.request_id.in_(old))).rowcount

    while await database.write(delete) == MAX_AT_ONCE:
        pass
