"""Received offers: what other tenants offer to a tenant, which accepts (a grant) or declines.

A tenant sees only offers that were made after it was created: nobody can offer to a name before it
belongs to somebody.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Subquery,
    case,
    delete,
    func,
    null,
    select,
    update,
)

from registry.catalog import adapter_rows, grants
from registry.catalog.audit import record_audit
from registry.catalog.offers import KEPT_MS, is_of, is_standing
from registry.errors import NotFound
from registry.ref import BaseRef
from registry.tables import adapter_aliases as aliases
from registry.tables import adapter_grants as granted
from registry.tables import adapter_offers as offers
from registry.tables import adapter_versions as versions
from registry.tables import adapters

MAX_LISTED = 100
"""Pending offers that one list shows."""
MAX_ACCEPTED = 1000
"""Accepted adapters that one list shows."""
MAX_LISTED_PER_OWNER = 10
"""Pending offers of one owner that one list shows, the newest."""


@dataclass(frozen=True, slots=True)
class Addressee:
    """A tenant that may have offers.

    addresses: the texts that mean this tenant.   created_at_ms: earlier offers are not for it.
    """

    tenant_id: str
    addresses: tuple[str, ...]
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class ReceivedOffer:
    """An adapter offered to a tenant, with figures of its `latest`, if it has one.

    offered_at_ms: None once accepted.   granted_at_ms: None until accepted.
    """

    adapter_id: str
    owner_id: str
    name: str
    created_at_ms: int
    rank: int | None
    size_bytes: int | None
    base: BaseRef | None
    offered_at_ms: int | None = None
    granted_at_ms: int | None = None

    @property
    def expires_at_ms(self) -> int | None:
        return None if self.offered_at_ms is None else self.offered_at_ms + KEPT_MS


def accept(
    conn: Connection, to: Addressee, owner_id: str, name: str, *, actor: str, now_ms: int
) -> None:
    """Turn an offer into a grant, even if it was declined before; repeating is harmless.

    owner_id: "" if there is no such tenant. Raises NotFound.
    """
    if grants.is_granted(conn, owner_id, name, to.tenant_id):
        return
    # Nothing of the owner's is locked before it is clear that the owner made an offer.
    _find(conn, to, owner_id, name, now_ms)
    adapter_rows.lock_tenant(conn, owner_id)
    _, offered_by = _find(conn, to, owner_id, name, now_ms)
    adapter = adapter_rows.find_adapter(conn, owner_id, name)
    assert adapter is not None, "only adapters that are there are offered"
    grants.grant(conn, adapter, to.tenant_id, granted_by=offered_by, now_ms=now_ms)
    conn.execute(delete(offers).where(is_of(adapter), offers.c.addressee.in_(to.addresses)))
    _record(conn, "offer.accepted", to, owner_id, name, actor, now_ms)


def decline(
    conn: Connection, to: Addressee, owner_id: str, name: str, *, actor: str, now_ms: int
) -> None:
    """Hide an offer, or give back what was accepted; repeating is harmless. Raises NotFound.

    The owner sees only that an accepted adapter was given back.
    """
    if not grants.is_granted(conn, owner_id, name, to.tenant_id):
        adapter_id, _ = _find(conn, to, owner_id, name, now_ms)
        its = (offers.c.adapter_id == adapter_id) & offers.c.addressee.in_(to.addresses)
        conn.execute(update(offers).where(its).values(is_declined=True))
        _record(conn, "offer.declined", to, owner_id, name, actor, now_ms)
        return
    adapter_rows.lock_tenant(conn, owner_id)
    adapter = adapter_rows.find_adapter(conn, owner_id, name)
    if adapter is not None:
        grants.end(conn, adapter, to.tenant_id, now_ms=now_ms)
        _record(conn, "offer.given_back", to, owner_id, name, actor, now_ms)


def list_pending(conn: Connection, to: Addressee, now_ms: int) -> tuple[list[ReceivedOffer], bool]:
    """Pending offers, and whether there are more than these.

    The newest offer of every owner comes first, then every owner's second: an owner with many
    offers hides nobody else's.
    """
    newest = _pending(to, now_ms)
    query = (
        _described(newest.c.offered_at_ms, newest.c.num_pending)
        .join(newest, newest.c.adapter_id == adapters.c.adapter_id)
        .where(newest.c.place <= MAX_LISTED_PER_OWNER)
        .order_by(newest.c.place, newest.c.offered_at_ms.desc(), adapters.c.adapter_id)
    )
    rows = conn.execute(query.limit(MAX_LISTED)).all()
    found = [_offer(*row[:-1]) for row in rows]
    return found, bool(rows) and rows[0].num_pending > len(rows)


def list_accepted(
    conn: Connection, tenant_id: str, base_revisions: Collection[str] | None = None
) -> list[ReceivedOffer]:
    """Adapters that the tenant accepted and may use, by owner and name.

    base_revisions: lists only those whose `latest` is for a base model of these revisions.
    """
    query = (
        _described(null(), granted.c.granted_at_ms)
        .join(granted, granted.c.adapter_id == adapters.c.adapter_id)
        .where(granted.c.grantee_id == tenant_id, granted.c.tenant_id == adapters.c.tenant_id)
        .where(adapters.c.deleted_at_ms.is_(None))
        .order_by(adapters.c.tenant_id, adapters.c.name)
    )
    if base_revisions is not None:
        query = query.where(versions.c.base_revision.in_(base_revisions))
    return [_offer(*row) for row in conn.execute(query.limit(MAX_ACCEPTED))]


def _pending(to: Addressee, now_ms: int) -> Subquery:
    """Pending offers with their `place` among their owner's, and their number in `num_pending`."""
    received = (
        # Both the tenant's name and its id may have been written.
        select(
            offers.c.adapter_id, offers.c.tenant_id, func.max(offers.c.offered_at_ms).label("at")
        )
        .join(adapters, adapters.c.adapter_id == offers.c.adapter_id)
        .outerjoin(
            granted,
            (granted.c.adapter_id == offers.c.adapter_id) & (granted.c.grantee_id == to.tenant_id),
        )
        .where(*_is_to(to, now_ms), adapters.c.deleted_at_ms.is_(None))
        .where(granted.c.adapter_id.is_(None))
        .group_by(offers.c.adapter_id, offers.c.tenant_id)
        .having(func.max(case((offers.c.is_declined, 1), else_=0)) == 0)
        .subquery()
    )
    order = received.c.at.desc(), received.c.adapter_id
    return select(
        received.c.adapter_id,
        received.c.at.label("offered_at_ms"),
        func.row_number().over(partition_by=received.c.tenant_id, order_by=order).label("place"),
        func.count().over().label("num_pending"),
    ).subquery()


def _described(*times: ColumnElement[Any]) -> Select[Any]:
    """Adapters with what helps to decide about them; `times` are added to the columns."""
    return (
        select(
            adapters.c.adapter_id,
            adapters.c.tenant_id,
            adapters.c.name,
            adapters.c.created_at_ms,
            versions.c.rank,
            versions.c.size_bytes,
            versions.c.base_revision,
            versions.c.base_model,
            versions.c.base_variant,
            *times,
        )
        .outerjoin(
            aliases,
            (aliases.c.adapter_id == adapters.c.adapter_id)
            & (aliases.c.alias == adapter_rows.LATEST),
        )
        .outerjoin(versions, adapter_rows.is_meant_by(aliases))
    )


def _offer(*row: Any) -> ReceivedOffer:
    """Make an offer of the columns that `_described` selects."""
    base = BaseRef(*row[6:9]) if row[6] else None
    values = [*row[:6], base, *row[9:]]
    return ReceivedOffer(*values)


def _record(
    conn: Connection, action: str, to: Addressee, owner_id: str, name: str, actor: str, now_ms: int
) -> None:
    """Add a line to the addressee's audit log; the owner sees none."""
    target = f"{owner_id}/{name}"
    record_audit(conn, to.tenant_id, action, target=target, at_ms=now_ms, actor=actor)


def _find(
    conn: Connection, to: Addressee, owner_id: str, name: str, now_ms: int
) -> tuple[str, str]:
    """The adapter's id, and who offered it; also if it was declined. Raises NotFound."""
    query = (
        select(offers.c.adapter_id, offers.c.offered_by)
        .join(adapters, adapters.c.adapter_id == offers.c.adapter_id)
        .where(
            *_is_to(to, now_ms),
            offers.c.tenant_id == owner_id,
            *adapter_rows.is_named(owner_id, name),
        )
    )
    found = conn.execute(query).first()
    if found is None:
        raise offer_not_found()
    return found.adapter_id, found.offered_by


def offer_not_found() -> NotFound:
    """The fault of a tenant that has no such offer, and accepted none."""
    message = "There is no such offer to you; GET /v1/offers lists yours."
    return NotFound(message, code="offer_not_found")


def _is_to(to: Addressee, now_ms: int) -> tuple[ColumnElement[bool], ...]:
    is_later = offers.c.offered_at_ms > to.created_at_ms
    return offers.c.addressee.in_(to.addresses), is_later, *is_standing(now_ms)
