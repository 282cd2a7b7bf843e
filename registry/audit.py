"""The log of what was done, by whom and to what: of tenants, keys and adapters."""

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
    """One line of the audit log, in the transaction of what it tells about.

    actor: `operator`, `gateway` for what falls due, or `key:` and a key's id.
    tenant_id: whose thing the target is.
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
