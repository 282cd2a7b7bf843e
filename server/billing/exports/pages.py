"""Reads the receipts of a time range page by page: by tenant, each tenant's in order of seq."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.receipts.receipt import Receipt
from server.billing.receipts.rows import is_tenants, read_receipts, select_receipts
from server.billing.tables import entries, ledger_head

PAGE_SIZE = 500
MAX_STEPS = 64
"""Steps of one read, each past a tenant or part of a chain without entries in the range."""
_MAX_MS = 2**62

_entries = entries.c


@dataclass(frozen=True, slots=True)
class Place:
    """A reader's position: the last receipt that it has, in order of tenant and then seq."""

    tenant_id: str = ""
    receipt_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Entries in [start_ms, end_ms) up to entry id `through`. tenant_id None is every tenant.

    period: take the entries on this month's statements instead.
    """

    tenant_id: str | None
    start_ms: int
    end_ms: int
    through: int
    period: str | None = None

    @classmethod
    def clamped(cls, tenant_id: str | None, start_ms: int, end_ms: int, through: int) -> "Range":
        """Make a range of a caller's numbers, clamped to numbers that fit into the columns."""
        start_ms, end_ms, through = (
            min(max(given, 0), _MAX_MS) for given in (start_ms, end_ms, through)
        )
        return cls(tenant_id=tenant_id, start_ms=start_ms, end_ms=end_ms, through=through)


@dataclass(frozen=True, slots=True)
class Page:
    """A page. receipts: may be empty though more follow.   next: the next place; None if last."""

    receipts: Sequence[Receipt]
    next: Place | None


def last_entry_id(conn: Connection, tenant_id: str | None) -> int:
    """Return the last entry posted by now, as an upper bound for all pages of one export.

    A tenant gets its own last entry, so that it cannot count the entries of others.
    """
    if tenant_id is None:
        query = sa.select(ledger_head.c.last_entry_id).where(ledger_head.c.name == "ledger")
    else:
        query = sa.select(_entries.entry_id).where(_entries.tenant_id == tenant_id)
        query = query.order_by(_entries.receipt_seq.desc()).limit(1)
    return conn.scalar(query) or 0


def place_of_entry(conn: Connection, tenant_id: str | None, entry_id: int) -> Place | None:
    """Return the place of an entry of that tenant, or of any; None if there is no such entry."""
    query = sa.select(_entries.tenant_id, _entries.receipt_seq)
    query = query.where(_entries.entry_id == min(max(entry_id, 0), _MAX_MS))
    if tenant_id is not None:
        query = query.where(_entries.tenant_id == tenant_id)
    row = conn.execute(query).one_or_none()
    return None if row is None else Place(row.tenant_id, row.receipt_seq)


def read_page(conn: Connection, within: Range, place: Place, size: int = PAGE_SIZE) -> Page:
    """Return receipts after `place`, from at most `size` entries; the read is short."""
    for _ in range(MAX_STEPS):
        tenant_id = within.tenant_id or place.tenant_id
        found = _next_seq(conn, replace(within, tenant_id=tenant_id), place.receipt_seq)
        if found is not None:
            receipts = _read(conn, within, Place(tenant_id, found - 1), size)
            # A tenant's entry numbers rise with its seq: after one beyond `through`, all are.
            if receipts:
                return Page(receipts, Place(tenant_id, found - 1 + size))
        if within.tenant_id is not None or (follower := _next_tenant(conn, place)) is None:
            return Page((), None)
        place = Place(follower)
    return Page((), place)


def _next_seq(conn: Connection, within: Range, after_seq: int) -> int | None:
    """Return the seq of the tenant's first entry in the range after `after_seq`, or None."""
    # Adding 0 makes both planners use the index of times, not that of receipts, in which they would
    # walk all entries older than the range to find its first. The index of periods has receipts.
    seq = _entries.receipt_seq if within.period else _entries.receipt_seq + 0
    query = sa.select(sa.func.min(seq)).where(*_in_time(within), seq > after_seq)
    found: int | None = conn.scalar(query.where(_entries.tenant_id == within.tenant_id))
    return found


def _next_tenant(conn: Connection, place: Place) -> str | None:
    query = sa.select(sa.func.min(_entries.tenant_id))
    query = query.where(_entries.tenant_id > place.tenant_id, is_tenants(_entries.tenant_id))
    found: str | None = conn.scalar(query)
    return found


def _read(conn: Connection, within: Range, place: Place, size: int) -> list[Receipt]:
    seq = _entries.receipt_seq
    query = select_receipts().where(
        _entries.tenant_id == place.tenant_id,
        seq > place.receipt_seq,
        # The page is a part of the chain, not a number of hits, so that entries outside the range
        # cannot make the read long.
        seq <= place.receipt_seq + size,
        _entries.entry_id <= within.through,
        *_in_time(within),
    )
    return read_receipts(conn, query)


def _in_time(within: Range) -> tuple[sa.ColumnElement[bool], ...]:
    if within.period is not None:
        return (_entries.period == within.period,)
    return _entries.at_ms >= within.start_ms, _entries.at_ms < within.end_ms
