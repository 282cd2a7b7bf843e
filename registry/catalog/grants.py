"""Grants: an adapter that its owner shares with other tenants, which accepted its offer.

A grant permits requests for the adapter, under any of its aliases and versions, and nothing else.
Deleting the adapter ends its grants; restoring it does not bring them back. Functions that change
grants must be called under `lock_tenant`, with the adapter as it was read under that lock.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, func, insert, select

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import Adapter
from registry.catalog.audit import audit_adapter
from registry.catalog.events import record_event
from registry.tables import adapter_grants as grants
from registry.tables import adapters

MAX_GRANTS = 100
"""Tenants that one adapter can be shared with or offered to."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to use an adapter. tenant_id: the owner.   grantee_id: the permitted tenant."""

    adapter_id: str
    grantee_id: str
    tenant_id: str
    granted_at_ms: int
    granted_by: str


def grant(
    conn: Connection, adapter: Adapter, grantee_id: str, *, granted_by: str, now_ms: int
) -> None:
    """Let a tenant use the adapter from now on; repeating is harmless.

    granted_by: the owner's key that offered it.
    """
    if any(found.grantee_id == grantee_id for found in list_grants(conn, adapter)):
        return
    made = Grant(adapter.adapter_id, grantee_id, adapter.tenant_id, now_ms, granted_by)
    conn.execute(insert(grants).values(asdict(made)))
    record_event(conn, "granted", adapter.tenant_id, adapter.adapter_id, None, now_ms)


def revoke(conn: Connection, adapter: Adapter, grantee_id: str, *, actor: str, now_ms: int) -> None:
    """End a tenant's grant for its owner; repeating is harmless."""
    if end(conn, adapter, grantee_id, now_ms=now_ms):
        audit_adapter(conn, "adapter.revoked", adapter, grantee_id, actor, now_ms)


def revoke_all(conn: Connection, adapter: Adapter, *, actor: str, now_ms: int) -> None:
    """End all grants of an adapter that is deleted: a new adapter of its name starts unshared."""
    for found in list_grants(conn, adapter):
        revoke(conn, adapter, found.grantee_id, actor=actor, now_ms=now_ms)


def end(conn: Connection, adapter: Adapter, grantee_id: str, *, now_ms: int) -> bool:
    """End a tenant's grant, so that its next request is refused. False if there is none."""
    is_it = (grants.c.adapter_id == adapter.adapter_id) & (grants.c.grantee_id == grantee_id)
    ended = delete(grants).where(is_it, grants.c.tenant_id == adapter.tenant_id)
    if not conn.execute(ended).rowcount:
        return False
    record_event(conn, "revoked", adapter.tenant_id, adapter.adapter_id, None, now_ms)
    record_event(conn, "ungranted", grantee_id, adapter.adapter_id, None, now_ms)
    return True


def list_grants(conn: Connection, adapter: Adapter) -> list[Grant]:
    """Grants of the adapter, oldest first."""
    query = select(grants).where(
        grants.c.adapter_id == adapter.adapter_id, grants.c.tenant_id == adapter.tenant_id
    )
    rows = conn.execute(query.order_by(grants.c.granted_at_ms, grants.c.grantee_id))
    return [Grant(**row._mapping) for row in rows]


def count_grants(conn: Connection, tenant_id: str, adapter_ids: Collection[str]) -> dict[str, int]:
    """The number of grants of each of the owner's adapters that has any, by adapter_id."""
    query = select(grants.c.adapter_id, func.count()).where(
        grants.c.adapter_id.in_(adapter_ids), grants.c.tenant_id == tenant_id
    )
    return {row[0]: row[1] for row in conn.execute(query.group_by(grants.c.adapter_id))}


def is_granted(conn: Connection, owner_id: str, name: str, grantee_id: str) -> bool:
    """Whether the owner has an adapter of this name that the tenant may use."""
    query = (
        select(func.count())
        .select_from(grants)
        .join(adapters, adapters.c.adapter_id == grants.c.adapter_id)
        .where(
            grants.c.grantee_id == grantee_id,
            grants.c.tenant_id == owner_id,
            *adapter_rows.is_named(owner_id, name),
        )
    )
    return bool(conn.execute(query).scalar_one())
