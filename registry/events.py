"""What happened to adapters: what gateways act upon, each once.

Kept for an hour; whoever was away longer looks at everything anew.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, delete, func, insert, select

from registry.tables import adapter_events

# moved: a name means another version.   removed, restored: a version or all of them.
Kind = Literal["moved", "removed", "restored", "pinned", "unpinned", "granted", "revoked"]

KEPT_MS = 3_600_000
MAX_READ = 1000
MAX_PRUNED = 10_000
_LATE_MS = 30_000
"""An id that is not there by then never will be: no transaction takes that long."""
_MAX_MISSING = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """version: None where it is of the whole adapter."""

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
    """In the transaction of what it tells about. version: None for all of the adapter's."""
    conn.execute(
        insert(adapter_events).values(
            at_ms=at_ms, kind=kind, tenant_id=tenant_id, adapter_id=adapter_id, version=version
        )
    )


def newest_event_id(conn: Connection) -> int:
    """0 if there is none."""
    return conn.execute(select(func.max(adapter_events.c.event_id))).scalar() or 0


def prune_events(conn: Connection, now_ms: int) -> None:
    """Forget the oldest of those that nobody waits for any more."""
    old = (
        select(adapter_events.c.event_id)
        .where(adapter_events.c.at_ms < now_ms - KEPT_MS)
        .order_by(adapter_events.c.event_id)
        .limit(MAX_PRUNED)
    )
    conn.execute(delete(adapter_events).where(adapter_events.c.event_id.in_(old)))


class EventTail:
    """Reads every event once, those after `after_id`.

    An id is given when a row is written and seen when its transaction commits, so on PostgreSQL a
    lower one may appear after a higher one: ids that were passed over are asked for again.
    """

    def __init__(self, after_id: int) -> None:
        self.after_id = after_id
        self._missing: dict[int, int] = {}  # id: since when, in milliseconds

    def read(self, conn: Connection) -> list[Event]:
        """Those that were not taken, oldest first. Changes nothing here."""
        return _read(conn, self.after_id, self._missing.keys())

    def take(self, events: Sequence[Event], now_ms: int) -> None:
        """They have been acted upon."""
        for event in events:
            self._missing.pop(event.event_id, None)
            first = max(self.after_id + 1, event.event_id - _MAX_MISSING)
            self._missing |= dict.fromkeys(range(first, event.event_id), now_ms)
            self.after_id = max(self.after_id, event.event_id)
        for event_id, since_ms in list(self._missing.items()):
            # A rolled-back transaction leaves a hole for good.
            if since_ms < now_ms - _LATE_MS or len(self._missing) > _MAX_MISSING:
                del self._missing[event_id]


def _read(conn: Connection, after_id: int, missing: Collection[int]) -> list[Event]:
    event_id = adapter_events.c.event_id
    query = select(adapter_events).where((event_id > after_id) | event_id.in_(missing))
    rows = conn.execute(query.order_by(event_id).limit(MAX_READ))
    return [Event(**row._mapping) for row in rows]
