"""Rows of deleted adapters and versions: marked, restored within the retention, purged after it.

While an adapter is deleted, its row and the versions deleted with it have deleted_at_ms. Its alias
rows stay unchanged, but no query finds them.
"""

from collections import defaultdict

from sqlalchemy import ColumnElement, Connection, func, select, update

from registry.catalog.adapter_rows import DELETED, PURGED, READY, VersionState, lock_tenant
from registry.tables import adapter_versions as versions
from registry.tables import adapters


def delete_adapter(conn: Connection, tenant_id: str, adapter_id: str, now_ms: int) -> None:
    """Mark an adapter and its ready versions as deleted at a time after its earlier deletions."""
    is_its = _versions_of(tenant_id, adapter_id)
    last_ms = conn.execute(select(func.max(versions.c.deleted_at_ms)).where(*is_its)).scalar()
    # This time alone decides which versions are restored with the adapter.
    at_ms = max(now_ms, (last_ms or 0) + 1)
    conn.execute(
        update(versions)
        .where(*is_its, versions.c.state == READY)
        .values(state=DELETED, deleted_at_ms=at_ms)
    )
    set_adapter(conn, tenant_id, adapter_id, at_ms)


def restore_adapter(conn: Connection, tenant_id: str, adapter_id: str, deleted_at_ms: int) -> bool:
    """Restore an adapter and the versions deleted with it. False if one of them is purged."""
    with_it = (*_versions_of(tenant_id, adapter_id), versions.c.deleted_at_ms == deleted_at_ms)
    purged = select(versions.c.version).where(*with_it, versions.c.state == PURGED)
    if conn.execute(purged.limit(1)).first():
        return False
    conn.execute(update(versions).where(*with_it).values(state=READY, deleted_at_ms=None))
    set_adapter(conn, tenant_id, adapter_id, None)
    return True


def list_deleted(
    conn: Connection, tenant_id: str, since_ms: int, limit: int
) -> list[tuple[str, int]]:
    """(name, deleted_at_ms) of the adapters deleted after `since_ms`, the last deleted first."""
    query = select(adapters.c.name, adapters.c.deleted_at_ms).where(
        adapters.c.tenant_id == tenant_id, adapters.c.deleted_at_ms > since_ms
    )
    rows = conn.execute(query.order_by(adapters.c.deleted_at_ms.desc()).limit(limit))
    return [(row.name, row.deleted_at_ms) for row in rows]


def purge_versions(conn: Connection, until_ms: int, limit: int) -> int:
    """Purge up to `limit` versions that were deleted until `until_ms`. Returns how many."""
    is_over = (versions.c.state == DELETED, versions.c.deleted_at_ms <= until_ms)
    query = select(versions.c.tenant_id, versions.c.adapter_id, versions.c.version)
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in conn.execute(query.where(*is_over).limit(limit)):
        found[row.tenant_id, row.adapter_id].append(row.version)
    num_purged = 0
    # Tenants are locked in one order, so that two purges cannot deadlock.
    for (tenant_id, adapter_id), numbers in sorted(found.items()):
        lock_tenant(conn, tenant_id)
        purged = conn.execute(
            update(versions)
            .where(*_versions_of(tenant_id, adapter_id), versions.c.version.in_(numbers))
            .where(*is_over)  # checked again under the lock: it may have been restored meanwhile
            .values(state=PURGED)
        )
        num_purged += purged.rowcount
    return num_purged


def _versions_of(tenant_id: str, adapter_id: str) -> tuple[ColumnElement[bool], ...]:
    # The third condition is always true; without it SQLite uses the index of the tenant's digests.
    return (
        versions.c.adapter_id == adapter_id,
        versions.c.tenant_id == tenant_id,
        versions.c.version > 0,
    )


def set_adapter(
    conn: Connection, tenant_id: str, adapter_id: str, deleted_at_ms: int | None
) -> None:
    """Mark the adapter's row alone; its versions stay as they are."""
    conn.execute(
        update(adapters)
        .where(adapters.c.adapter_id == adapter_id, adapters.c.tenant_id == tenant_id)
        .values(deleted_at_ms=deleted_at_ms)
    )


def set_version(
    conn: Connection,
    tenant_id: str,
    adapter_id: str,
    number: int,
    state: VersionState,
    deleted_at_ms: int | None,
) -> None:
    conn.execute(
        update(versions)
        .where(*_versions_of(tenant_id, adapter_id), versions.c.version == number)
        .values(state=state, deleted_at_ms=deleted_at_ms)
    )
