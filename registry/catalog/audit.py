"""The audit log: which actor did what to which tenant, key or adapter."""

from collections.abc import Mapping
from datetime import UTC, datetime

from sqlalchemy import Connection, insert

from registry.catalog.adapter_rows import Adapter
from registry.tables import audit_log


def record_audit(
    conn: Connection,
    tenant_id: str | None,
    action: str,
    detail: str = "",
    *,
    target: str = "",
    at_ms: int,
    actor: str,
) -> None:
    """Add a line to the audit log, in the transaction of the logged change.

    tenant_id: the tenant that owns the target, or None.   target: by default the tenant.
    actor: `operator`, `gateway` for scheduled work, or `key:` and a key's id.
    """
    values = {"at_ms": at_ms, "actor": actor, "action": action, "detail": detail}
    owned = {"target": target or tenant_id, "tenant_id": tenant_id}
    conn.execute(insert(audit_log).values(**values, **owned))


def audit_adapter(
    conn: Connection, action: str, adapter: Adapter, detail: str, actor: str, now_ms: int
) -> None:
    """Add a line about an adapter to its owner's part of the audit log."""
    owner, target = adapter.tenant_id, f"{adapter.tenant_id}/{adapter.name}"
    record_audit(conn, owner, action, detail, target=target, at_ms=now_ms, actor=actor)


def in_words(values: Mapping[str, object]) -> str:
    """Say values for a line's detail.   Names that end in _ms are of moments in milliseconds."""
    return " ".join(f"{name.removesuffix('_ms')}={_text(name, it)}" for name, it in values.items())


def _text(name: str, value: object) -> object:
    if isinstance(value, int) and name.endswith("_ms"):
        return f"{datetime.fromtimestamp(value // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "") else value
