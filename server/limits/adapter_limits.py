"""Limits of an adapter for all its users together: its owner and the tenants it is shared with."""

from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.adapter_rows import owner_of
from registry.catalog.audit import in_words, record_audit
from registry.tables import adapters
from server.limits.amounts import Amounts
from server.limits.rules import Limit
from server.limits.tables import adapter_limits

_MAX_LISTED = 100


def get_adapter_limits(conn: Connection, adapter_id: str) -> Amounts:
    query = sa.select(adapter_limits).where(adapter_limits.c.adapter_id == adapter_id)
    return Amounts.read(conn.execute(query).mappings().first())


def set_adapter_limits(
    conn: Connection, adapter_id: str, amounts: Amounts, *, now_ms: int, actor: str
) -> None:
    """Replace all limits of an adapter, from now on and on every gateway."""
    tenant_id = owner_of(conn, adapter_id)
    assert tenant_id is not None
    amounts.write(conn, adapter_limits, {"adapter_id": adapter_id, "tenant_id": tenant_id})
    action, detail = "adapter.limits", in_words(asdict(amounts))
    record_audit(conn, tenant_id, action, detail, target=adapter_id, at_ms=now_ms, actor=actor)


def limits_of_adapters(
    conn: Connection, tenant_id: str
) -> list[tuple[str, str, tuple[Limit, ...]]]:
    """(name, adapter_id, limits) of a tenant's adapters that have limits, sorted by name."""
    query = sa.select(adapters.c.name, adapter_limits).join(
        adapters, adapters.c.adapter_id == adapter_limits.c.adapter_id
    )
    query = query.where(adapters.c.tenant_id == tenant_id, adapters.c.deleted_at_ms.is_(None))
    query = query.order_by(adapters.c.name).limit(_MAX_LISTED)
    return [
        (row["name"], row["adapter_id"], Amounts.read(row).limits("adapter", row["adapter_id"]))
        for row in conn.execute(query).mappings()
    ]
