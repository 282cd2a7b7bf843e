"""The audit log: which actor did what to which tenant, key or adapter."""

from sqlalchemy import Connection, insert

from registry.tables import audit_log


def record_audit(
    conn: Connection,
    *,
    at_ms: int,
    actor: str,
    action: str,
    target: str,
    detail: str = "",
    tenant_id: str | None = None,
) -> None:
    """Add a line to the audit log, in the transaction of the logged change.

    actor: `operator`, `gateway` for scheduled work, or `key:` and a key's id.
    tenant_id: the tenant that owns the target, or None.
    """
    conn.execute(
        insert(audit_log).values(
            at_ms=at_ms,
            actor=actor,
            action=action,
            target=target,
            detail=detail,
            tenant_id=tenant_id,
        )
    )
