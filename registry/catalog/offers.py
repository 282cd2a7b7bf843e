"""Offers: an owner offers an adapter to a tenant, which accepts it (a grant) or declines it.

An offer holds the addressee's name or id as the owner wrote it. Nobody looks up whether there is
such a tenant, and a declined offer looks pending to its owner, so that an owner learns nothing
about tenants that do not accept. `registry.catalog.received_offers` is the addressee's side.
Functions that change offers must be called under `lock_tenant`, with the adapter as it was read
under that lock.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, tuple_, update

from registry.catalog import grants
from registry.catalog.adapter_rows import Adapter
from registry.catalog.audit import audit_adapter
from registry.catalog.names import invalid_name, is_name
from registry.errors import QuotaExceeded
from registry.tables import adapter_offers as offers

KEPT_MS = 30 * 86_400_000
"""Time for which an offer can be accepted, in milliseconds."""
MAX_OFFERS = 1000
"""Offers of one owner in KEPT_MS; withdrawn ones count, which bounds how many names it can try."""
MAX_PRUNED = 10_000


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer as its owner sees it."""

    addressee: str
    offered_at_ms: int

    @property
    def expires_at_ms(self) -> int:
        return self.offered_at_ms + KEPT_MS


def offer(conn: Connection, adapter: Adapter, addressee: str, *, actor: str, now_ms: int) -> Offer:
    """Offer the adapter from now on; repeating begins the offer's time anew.

    A declined offer stays hidden from its addressee until its time is over. Raises Invalid,
    QuotaExceeded.
    """
    _check_addressee(addressee)
    is_it = is_of(adapter) & (offers.c.addressee == addressee)
    row = conn.execute(select(offers).where(is_it)).first()
    is_in_time = row is not None and row.offered_at_ms > now_ms - KEPT_MS
    is_pending = row is not None and is_in_time and not row.is_withdrawn
    if not is_pending:
        _check_room(conn, adapter, now_ms, is_new=not is_in_time)
    values = {
        "offered_at_ms": now_ms,
        "offered_by": actor,
        "is_withdrawn": False,
        "is_declined": row is not None and is_in_time and row.is_declined,
    }
    if row is not None:
        conn.execute(update(offers).where(is_it).values(values))
    else:
        keys = {"adapter_id": adapter.adapter_id, "addressee": addressee}
        conn.execute(insert(offers).values(**keys, tenant_id=adapter.tenant_id, **values))
    if not is_pending:
        audit_adapter(conn, "offer.offered", adapter, addressee, actor, now_ms)
    return Offer(addressee, now_ms)


def withdraw(
    conn: Connection, adapter: Adapter, addressee: str, *, actor: str, now_ms: int
) -> None:
    """End an offer that is not accepted; repeating is harmless. Raises Invalid."""
    _check_addressee(addressee)
    is_it = is_of(adapter), offers.c.addressee == addressee, offers.c.is_withdrawn.is_(False)
    if conn.execute(update(offers).where(*is_it).values(is_withdrawn=True)).rowcount:
        audit_adapter(conn, "offer.withdrawn", adapter, addressee, actor, now_ms)


def withdraw_all(conn: Connection, adapter: Adapter) -> None:
    """End all offers of an adapter that is deleted, as `grants.revoke_all` ends its grants."""
    conn.execute(update(offers).where(is_of(adapter)).values(is_withdrawn=True))


def list_made(conn: Connection, adapter: Adapter, now_ms: int) -> list[Offer]:
    """Offers of the adapter that its owner may think pending, oldest first."""
    query = select(offers.c.addressee, offers.c.offered_at_ms).where(
        is_of(adapter), *is_standing(now_ms)
    )
    rows = conn.execute(query.order_by(offers.c.offered_at_ms, offers.c.addressee))
    return [Offer(*row) for row in rows]


def prune_offers(conn: Connection, now_ms: int) -> None:
    """Delete up to MAX_PRUNED of the offers whose time is over, oldest first."""
    over = select(offers.c.adapter_id, offers.c.addressee).where(
        offers.c.offered_at_ms <= now_ms - KEPT_MS
    )
    oldest = over.order_by(offers.c.offered_at_ms).limit(MAX_PRUNED)
    conn.execute(delete(offers).where(tuple_(offers.c.adapter_id, offers.c.addressee).in_(oldest)))


def is_standing(now_ms: int) -> tuple[ColumnElement[bool], ...]:
    """SQL for whether an offer is in time and not withdrawn; it may be declined."""
    return offers.c.is_withdrawn.is_(False), offers.c.offered_at_ms > now_ms - KEPT_MS


def is_of(adapter: Adapter) -> ColumnElement[bool]:
    return (offers.c.adapter_id == adapter.adapter_id) & (offers.c.tenant_id == adapter.tenant_id)


def _check_addressee(addressee: str) -> None:
    if not is_name(addressee):
        raise invalid_name(addressee, "tenant", "a tenant's name or id")


def _check_room(conn: Connection, adapter: Adapter, now_ms: int, *, is_new: bool) -> None:
    """Check that there may be one more offer. is_new: it has no row in time. Raises QuotaExceeded.

    An accepted or declined offer counts as a pending one does: a limit tells nothing either.
    """
    num_shared = len(list_made(conn, adapter, now_ms)) + len(grants.list_grants(conn, adapter))
    if num_shared >= grants.MAX_GRANTS:
        raise QuotaExceeded.of("grants", grants.MAX_GRANTS, "revoke a grant first")
    is_counted = offers.c.tenant_id == adapter.tenant_id, offers.c.offered_at_ms > now_ms - KEPT_MS
    count = select(func.count()).select_from(offers).where(*is_counted)
    if is_new and conn.execute(count).scalar_one() >= MAX_OFFERS:
        remedy = "earlier offers stop counting 30 days after they were made"
        raise QuotaExceeded.of("offers", MAX_OFFERS, remedy)
