"""Tells tenants by webhook which of their limits refused requests, and how many."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from sqlalchemy.engine import Connection

from server.database.clock import now_ms
from server.database.database import Database
from server.limits.rules import Limit, Metric
from server.text.times import HOUR_MS
from server.webhooks.events import get_webhook, insert_event, new_event

RefusingLimit = Literal[
    "requests_per_minute", "tokens_per_minute", "concurrency", "budget", "queue_share", "queue"
]
"""Kinds of limits that refuse requests: of rates, of a budget, and of waiting requests, which are a
tenant's share of the queue and the queue of all.
"""
_KINDS: dict[Metric, RefusingLimit] = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrency": "concurrency",
}
INTERVAL_S = 5.0


@dataclass(slots=True, eq=False)
class LimitRefusals:
    """The refusals of one gateway by tenants' own limits, of which a tenant has three at most.

    They are counted in memory. A limit makes one event in a clock hour, with the refusals of the
    gateway that was first; the others go on counting.
    count: called for every refusal, with the kind of its limit.
    """

    database: Database
    clock: Callable[[], int] = now_ms
    count: Callable[[RefusingLimit], None] = lambda _: None
    _counts: Counter[Limit] = field(default_factory=Counter)
    _hours: dict[Limit, int] = field(default_factory=dict)

    def note(self, limit: Limit) -> None:
        self.count(_KINDS[limit.metric])
        if limit.scope == "tenant":
            self._counts[limit] += 1

    async def tell(self) -> None:
        """Insert the events that are due. Raises DatabaseError; then their counts are lost."""
        at_ms = self.clock()
        hour = at_ms // HOUR_MS
        self._hours = {limit: told for limit, told in self._hours.items() if told == hour}
        for limit in [limit for limit in self._counts if limit not in self._hours]:
            count = self._counts.pop(limit)
            write = partial(_insert, limit=limit, num_refused=count, at_ms=at_ms)
            if not await self.database.write(write):
                self._counts[limit] += count
            self._hours[limit] = hour


def _insert(conn: Connection, *, limit: Limit, num_refused: int, at_ms: int) -> bool:
    """Insert the event of the hour. Returns False if another gateway has done so already."""
    webhook = get_webhook(conn, limit.scope_id)
    if webhook is None or not webhook.is_enabled:
        return True
    data = {"tenant_id": limit.scope_id, "metric": limit.metric, "limit": limit.amount}
    data |= {"num_refused": num_refused}
    subject = f"{limit.metric} {at_ms // HOUR_MS}"
    event = new_event(limit.scope_id, "limit.reached", data, now_ms=at_ms, subject=subject)
    return insert_event(conn, event)
