"""Tenants: operators make, suspend and resume them, and set their limits and plans."""

import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import in_words, record_audit
from registry.catalog.events import record_event
from registry.errors import Conflict, Invalid, NotFound
from server.accounts.tables import tenants
from server.database.upsert import upsert
from server.limits.amounts import Amounts

# A tenant's name is the owner in `owner/name`, so it has the alphabet of an adapter's name.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NAME_IN_WORDS = "1 to 64 small letters, digits and . _ -, a letter or digit first"
_ID = re.compile(r"ten_[0-9a-f]{16}")

STANDARD = "standard"
"""Plan of a tenant that is created without one."""

TenantStatus = Literal["active", "suspended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits(Amounts):
    """Limits of a tenant; None is no limit.

    max_queue_share: share of the engines' queues that the tenant may hold, in (0, 1]; None: the
    setting's.   weight: the tenant's share of busy engines, relative to other tenants' weights.
    """

    max_queue_share: float | None = None
    weight: float = 1.0
    max_adapters: int | None = None
    max_adapter_bytes_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(TenantLimits):
    """A tenant, with its limits.

    ignore_unknown_fields: whether its requests' unknown fields are left out, not refused.
    legal_name, address: what its statements are addressed to.
    cache_salt: keeps the tenant's prefix cache apart; it never leaves the gateway and the engine.
    """

    tenant_id: str
    name: str
    status: TenantStatus
    plan: str
    ignore_unknown_fields: bool = False
    legal_name: str | None = None
    address: str | None = None
    cache_salt: str = field(repr=False)
    created_at_ms: int


def create_tenant(
    conn: Connection,
    name: str,
    *,
    now_ms: int,
    limits: TenantLimits | None = None,
    plan: str = STANDARD,
    actor: str = "operator",
) -> Tenant:
    """Make an active tenant. Raises Invalid, Conflict."""
    if not _NAME.fullmatch(name):
        raise Invalid(f"A tenant's name is {_NAME_IN_WORDS}.", param="name")
    tenant = Tenant(
        tenant_id=f"ten_{secrets.token_hex(8)}",
        name=name,
        status="active",
        plan=plan,
        cache_salt=secrets.token_hex(16),
        created_at_ms=now_ms,
        **_checked(limits or TenantLimits()),
    )
    check_plan(plan)
    insert = upsert(conn.dialect.name, tenants).values(**asdict(tenant))
    insert = insert.on_conflict_do_nothing(index_elements=["name"])
    if conn.scalar(insert.returning(tenants.c.tenant_id)) is None:
        message = f"A tenant named {name!r} exists already."
        raise Conflict(message, code="tenant_name_taken", param="name")
    record_audit(conn, tenant.tenant_id, "tenant.create", name, at_ms=now_ms, actor=actor)
    return tenant


def list_tenants(conn: Connection) -> list[Tenant]:
    rows = conn.execute(sa.select(tenants).order_by(tenants.c.created_at_ms, tenants.c.tenant_id))
    return [Tenant(**row._mapping) for row in rows]


def get_tenant(conn: Connection, tenant: str) -> Tenant:
    """The tenant of this id or this name. Raises NotFound."""
    # The form is checked here, since PostgreSQL refuses some texts that cannot be an id or a name.
    if not _NAME.fullmatch(tenant):
        raise _unknown(tenant)
    query = sa.select(tenants).where(
        sa.or_(tenants.c.tenant_id == tenant, tenants.c.name == tenant)
    )
    # An id wins over another tenant's name that looks like it.
    rows = [Tenant(**row._mapping) for row in conn.execute(query)]
    if not rows:
        raise _unknown(tenant)
    return min(rows, key=lambda row: row.tenant_id != tenant)


def find_id(conn: Connection, name: str) -> str | None:
    """The id of the tenant of this name, if there is one."""
    return conn.scalar(sa.select(tenants.c.tenant_id).where(tenants.c.name == name))


def addresses_of(tenant: Tenant) -> tuple[str, ...]:
    """Texts by which others mean this tenant: its id, and its name unless it reads like an id."""
    is_like_an_id = _ID.fullmatch(tenant.name)
    return (tenant.tenant_id,) if is_like_an_id else (tenant.tenant_id, tenant.name)


def names_of(conn: Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """{tenant_id: name} of the given tenants, without those that do not exist."""
    query = sa.select(tenants.c.tenant_id, tenants.c.name)
    rows = conn.execute(query.where(tenants.c.tenant_id.in_(tenant_ids)))
    return {row.tenant_id: row.name for row in rows}


def suspend_tenant(conn: Connection, tenant_id: str, *, now_ms: int) -> None:
    """Refuse a tenant's keys from now on; running requests go on. Raises NotFound."""
    _change(conn, tenant_id, {"status": "suspended"}, "suspend", "", now_ms)
    record_event(conn, "suspended", tenant_id, "", None, now_ms)


def resume_tenant(conn: Connection, tenant_id: str, *, now_ms: int) -> None:
    """Undo a suspension. Raises NotFound."""
    _change(conn, tenant_id, {"status": "active"}, "resume", "", now_ms)


def set_limits(conn: Connection, tenant_id: str, limits: TenantLimits, *, now_ms: int) -> None:
    """Replace all limits of a tenant. Raises Invalid, NotFound."""
    values = _checked(limits)
    _change(conn, tenant_id, values, "limits", in_words(values), now_ms)


def set_details(
    conn: Connection, tenant_id: str, details: Mapping[str, Any], *, now_ms: int
) -> None:
    """Change a tenant's plan, legal name, address, or whether its unknown fields are left out.

    details: by the names of the fields of Tenant. Raises Invalid, NotFound.
    """
    for name, value in details.items():
        if name == "plan":
            check_plan(value)
        _change(conn, tenant_id, {name: value}, name, in_words({name: value}), now_ms)


def check_plan(plan: str, *, param: str = "plan") -> None:
    """Check a plan's name. Any well-formed name is a plan. Raises Invalid."""
    if not _NAME.fullmatch(plan):
        raise Invalid(f"A plan's name is {_NAME_IN_WORDS}.", param=param)


def _change(
    conn: Connection,
    tenant_id: str,
    values: Mapping[str, Any],
    what: str,
    detail: str,
    now_ms: int,
) -> None:
    """Set columns of a tenant's row, and write an audit row. Raises NotFound."""
    query = sa.update(tenants).where(tenants.c.tenant_id == tenant_id).values(**values)
    if conn.execute(query).rowcount == 0:
        raise _unknown(tenant_id)
    record_audit(conn, tenant_id, f"tenant.{what}", detail, at_ms=now_ms, actor="operator")


def _unknown(tenant: str) -> NotFound:
    message = f"There is no tenant {tenant!r}."
    return NotFound(message, code="tenant_not_found", param="tenant")


def _checked(limits: TenantLimits) -> dict[str, Any]:
    """Return the limits alone, by name. Raises Invalid."""
    values = {field.name: getattr(limits, field.name) for field in fields(TenantLimits)}
    for name, value in values.items():
        if value is not None and value <= 0:
            raise Invalid(f"{name} is positive, or left out for no limit.", param=name)
    if limits.max_queue_share is not None and limits.max_queue_share > 1:
        raise Invalid("max_queue_share is a share: at most 1.", param="max_queue_share")
    return values
