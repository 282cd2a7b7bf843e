"""What was deleted, as rows: marked, brought back within the retention, purged after it.

An adapter's row has deleted_at_ms while it is deleted, and so do the versions that went with it;
its alias rows stay as they were, and are out of sight with it.
"""

from collections import defaultdict

from sqlalchemy import ColumnElement, Connection, func, select, update

from registry.adapter_rows import DELETED, PURGED, READY, lock_tenant
from registry.tables import adapter_versions as versions
from registry.tables import adapters


def delete_adapter(conn: Connection, tenant_id: str, adapter_id: str, now_ms: int) -> None:
    """The adapter and its ready versions, all at one time that no earlier deletion has."""
    is_its = _versions_of(tenant_id, adapter_id)
    last_ms = conn.execute(select(func.max(versions.c.deleted_at_ms)).where(*is_its)).scalar()
    # That time alone says which versions come back with the adapter.
    at_ms = max(now_ms, (last_ms or 0) + 1)
    conn.execute(
        update(versions)
        .where(*is_its, versions.c.state == READY)
        .values(state=DELETED, deleted_at_ms=at_ms)
    )
    _set_adapter(conn, tenant_id, adapter_id, at_ms)


def restore_adapter(conn: Connection, tenant_id: str, adapter_id: str, deleted_at_ms: int) -> bool:
    """Bring back the adapter and what was deleted with it. False if some of it is purged."""
    with_it = (*_versions_of(tenant_id, adapter_id), versions.c.deleted_at_ms == deleted_at_ms)
    purged = select(versions.c.version).where(*with_it, versions.c.state == PURGED)
    if conn.execute(purged.limit(1)).first():
        return False
    conn.execute(update(versions).where(*with_it).values(state=READY, deleted_at_ms=None))
    _set_adapter(conn, tenant_id, adapter_id, None)
    return True


def revive_adapter(conn: Connection, tenant_id: str, adapter_id: str) -> None:
    """The name alone comes back, for a new upload; the versions stay deleted."""
    _set_adapter(conn, tenant_id, adapter_id, None)


def delete_version(
    conn: Connection, tenant_id: str, adapter_id: str, number: int, now_ms: int
) -> None:
    _set_version(conn, tenant_id, adapter_id, number, state=DELETED, deleted_at_ms=now_ms)


def restore_version(conn: Connection, tenant_id: str, adapter_id: str, number: int) -> None:
    _set_version(conn, tenant_id, adapter_id, number, state=READY, deleted_at_ms=None)


def purge_versions(conn: Connection, until_ms: int, limit: int) -> int:
    """Purge what was deleted up to `until_ms`, at most `limit` versions. Returns how many."""
    is_over = (versions.c.state == DELETED, versions.c.deleted_at_ms <= until_ms)
    query = select(versions.c.tenant_id, versions.c.adapter_id, versions.c.version)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in conn.execute(query.where(*is_over).limit(limit)):
        found[row.tenant_id, row.adapter_id].append(row.version)
    num_purged = 0
    # Tenants in one order: two that purge do not wait for each other.
    for (tenant_id, adapter_id), numbers in sorted(found.items()):
        lock_tenant(conn, tenant_id)
        purged = conn.execute(
            update(versions)
            .where(*_versions_of(tenant_id, adapter_id), versions.c.version.in_(numbers))
            .where(*is_over)  # asked again under the lock: it may have been restored meanwhile
            .values(state=PURGED)
        )
        num_purged += purged.rowcount
    return num_purged


def _versions_of(tenant_id: str, adapter_id: str) -> tuple[ColumnElement[bool], ...]:
    # Numbers begin at 1. Without the third SQLite takes the index of the tenant's digests instead.
    return (
        versions.c.adapter_id == adapter_id,
        versions.c.tenant_id == tenant_id,
        versions.c.version > 0,
    )


def _set_adapter(
    conn: Connection, tenant_id: str, adapter_id: str, deleted_at_ms: int | None
) -> None:
    conn.execute(
        update(adapters)
        .where(adapters.c.adapter_id == adapter_id, adapters.c.tenant_id == tenant_id)
        .values(deleted_at_ms=deleted_at_ms)
    )


def _set_version(
    conn: Connection, tenant_id: str, adapter_id: str, number: int, **columns: str | int | None
) -> None:
    conn.execute(
        update(versions)
        .where(*_versions_of(tenant_id, adapter_id), versions.c.version == number)
        .values(columns)
    )
