"""What happened to adapters, in the order of commit of one writer: what gateways act upon.

Kept for an hour; whoever was away longer looks at everything anew.
"""

from typing import Literal

from sqlalchemy import Connection, insert

from registry.tables import adapter_events

# moved: a name means another version.   removed, restored: a version or all of them.
Kind = Literal["moved", "removed", "restored", "pinned", "unpinned", "granted", "revoked"]


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
