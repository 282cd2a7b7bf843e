"""Limits of an adapter for all its users together: its owner and the tenants it is shared with."""

from dataclasses import dataclass, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from registry.adapter_rows import owner_of
from registry.audit import record_audit
from registry.tables import adapters
from server.database.upsert import upsert
from server.limits.rules import Limit, Metric
from server.limits.tables import adapter_limits

_MAX_LISTED = 100
_METRICS: dict[str, Metric] = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "max_concurrency": "concurrency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """The limits of one adapter; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None

    def of(self, adapter_id: str) -> tuple[Limit, ...]:
        """The limits that are set, in the limiter's form."""
        return tuple(
            Limit(metric, "adapter", adapter_id, amount)
            for name, metric in _METRICS.items()
            if (amount := getattr(self, name)) is not None
        )


def get_adapter_limits(conn: Connection, adapter_id: str) -> AdapterLimits:
    query = sa.select(adapter_limits).where(adapter_limits.c.adapter_id == adapter_id)
    row = conn.execute(query).mappings().first()
    return _limits(row) if row else AdapterLimits()


def set_adapter_limits(
    conn: Connection, adapter_id: str, limits: AdapterLimits, *, now_ms: int, actor: str
) -> None:
    """Replace all limits of an adapter, from now on and on every gateway."""
    tenant_id = owner_of(conn, adapter_id)
    values = {field.name: getattr(limits, field.name) for field in fields(AdapterLimits)}
    insert = upsert(conn.dialect.name, adapter_limits)
    statement = insert.values(
        adapter_id=adapter_id, tenant_id=tenant_id, **values
    ).on_conflict_do_update(index_elements=["adapter_id"], set_=values)
    conn.execute(statement)
    detail = " ".join(f"{name}={value}" for name, value in values.items())
    record_audit(
        conn,
        at_ms=now_ms,
        actor=actor,
        action="adapter.limits",
        target=adapter_id,
        tenant_id=tenant_id,
        detail=detail,
    )


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
        (row["name"], row["adapter_id"], _limits(row).of(row["adapter_id"]))
        for row in conn.execute(query).mappings()
    ]


def _limits(row: RowMapping) -> AdapterLimits:
    return AdapterLimits(**{field.name: row[field.name] for field in fields(AdapterLimits)})
