"""Limits of a tenant on one base model, with and without adapters, which the operator sets."""

from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import in_words, record_audit
from registry.errors import Conflict
from server.limits.amounts import Amounts
from server.limits.rules import Limit
from server.limits.tables import base_limits

MAX_BASES = 100
"""Base models on which one tenant may have limits: every key of the tenant is read with them."""


def get_base_limits(conn: Connection, tenant_id: str) -> dict[str, Amounts]:
    """{base_model: amounts} of the base models on which a tenant has limits, sorted by name."""
    query = sa.select(base_limits).where(base_limits.c.tenant_id == tenant_id)
    rows = conn.execute(query.order_by(base_limits.c.base_model)).mappings()
    return {row["base_model"]: Amounts.read(row) for row in rows}


def limits_by_base(conn: Connection, tenant_id: str) -> tuple[Limit, ...]:
    """All of them in the limiter's form."""
    found = get_base_limits(conn, tenant_id).items()
    return tuple(
        limit
        for base_model, amounts in found
        for limit in amounts.limits("base", scope_id(tenant_id, base_model))
    )


def set_base_limits(
    conn: Connection, tenant_id: str, base_model: str, amounts: Amounts, *, now_ms: int, actor: str
) -> None:
    """Replace all limits of a tenant on a base model; without any, its row goes.

    They hold for this gateway once it forgets the tenant's identities, for others within two
    seconds. Raises Conflict if the tenant has limits on MAX_BASES others.
    """
    key = {"tenant_id": tenant_id, "base_model": base_model}
    if amounts == Amounts():
        conn.execute(sa.delete(base_limits).filter_by(**key))
    else:
        others = get_base_limits(conn, tenant_id).keys() - {base_model}
        if len(others) >= MAX_BASES:
            raise Conflict(
                f"The tenant has limits on {MAX_BASES} base models; remove those on one of them.",
                param="base_model",
            )
        amounts.write(conn, base_limits, key)
    action, detail = "tenant.base_limits", in_words(asdict(amounts))
    record_audit(conn, tenant_id, action, detail, target=base_model, at_ms=now_ms, actor=actor)


def scope_id(tenant_id: str, base_model: str) -> str:
    """The id under which a tenant's limits on a base model count."""
    return f"{tenant_id}/{base_model}"


def tenant_and_base(limit: Limit) -> tuple[str, str]:
    """The tenant_id and the base model's name of a limit whose scope is `base`."""
    tenant_id, _, base_model = limit.scope_id.partition("/")
    return tenant_id, base_model
