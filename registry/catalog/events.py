"""Events of adapters and their users, on which every gateway acts once.

Events are kept for an hour; a gateway that was away longer reads the whole state anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, delete, func, insert, select

from registry.tables import adapter_events

# moved: an alias means another version.   removed, restored: one version, or all of an adapter.
# revoked, ungranted: a grant ended, told of the adapter's owner and of the tenant that had it.
# suspended: a tenant, without an adapter.
Kind = Literal[
    "moved", "removed", "restored", "pinned", "unpinned", "granted", "revoked", "ungranted",
    "suspended",
]  # fmt: skip

KEPT_MS = 3_600_000
MAX_READ = 1000
MAX_PRUNED = 10_000
_LATE_MS = 30_000
"""A missing id that has not appeared by then never will: no transaction takes that long."""
_MAX_MISSING = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """One change. version: None for the whole adapter.   adapter_id: empty without an adapter."""

    event_id: int
    at_ms: int
    kind: str
    tenant_id: str
    adapter_id: str
    version: int | None


def record_event(
    conn: Connection,
    kind: Kind,
    tenant_id: str,
    adapter_id: str,
    version: int | None,
    at_ms: int,
) -> None:
    """Record an event in the transaction of the change. version: None for the whole adapter."""
    conn.execute(
        insert(adapter_events).values(
            at_ms=at_ms, kind=kind, tenant_id=tenant_id, adapter_id=adapter_id, version=version
        )
    )


def newest_event_id(conn: Connection) -> int:
    """Id of the newest event; 0 if there are no events."""
    return conn.execute(select(func.max(adapter_events.c.event_id))).scalar() or 0


def prune_events(conn: Connection, now_ms: int) -> None:
    """Delete up to MAX_PRUNED of the events that are older than KEPT_MS, oldest first."""
    old = (
        select(adapter_events.c.event_id)
        .where(adapter_events.c.at_ms < now_ms - KEPT_MS)
        .order_by(adapter_events.c.event_id)
        .limit(MAX_PRUNED)
    )
    conn.execute(delete(adapter_events).where(adapter_events.c.event_id.in_(old)))


class EventTail:
    """Reads every event after `after_id` once.

    An id is assigned when a row is written and seen when its transaction commits, so on PostgreSQL
    a lower id may appear after a higher one: ids that were passed over are queried again.
    """

    def __init__(self, after_id: int) -> None:
        self.after_id = after_id
        self._missing: dict[int, int] = {}  # id: missing since, in milliseconds

    def read(self, conn: Connection) -> list[Event]:
        """Events that were not taken yet, oldest first. Reading does not take them."""
        event_id = adapter_events.c.event_id
        is_new = (event_id > self.after_id) | event_id.in_(self._missing.keys())
        query = select(adapter_events).where(is_new).order_by(event_id).limit(MAX_READ)
        return [Event(**row._mapping) for row in conn.execute(query)]

    def take(self, events: Sequence[Event], now_ms: int) -> None:
        """Mark events that the caller has acted on as taken."""
        for event in events:
            self._missing.pop(event.event_id, None)
            first = max(self.after_id + 1, event.event_id - _MAX_MISSING)
            self._missing |= dict.fromkeys(range(first, event.event_id), now_ms)
            self.after_id = max(self.after_id, event.event_id)
        for event_id, since_ms in list(self._missing.items()):
            # A rolled-back transaction leaves a hole for good.
            if since_ms < now_ms - _LATE_MS or len(self._missing) > _MAX_MISSING:
                del self._missing[event_id]
