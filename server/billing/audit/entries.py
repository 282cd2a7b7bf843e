"""Checks of each entry: seal and chain, its event, the event's price, and the entry it reverses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.billing.audit.report import UNREADABLE, Finding, Scope, differences
from server.billing.months import month_before, month_of
from server.billing.old_holds import KEPT_MS
from server.billing.rating import TokenPrices, kept_amount, rate
from server.billing.receipts.faults import signature_faults
from server.billing.receipts.receipt import GENESIS, UNDOING, sha256_of, tenant_account
from server.billing.receipts.rows import KEPT_KINDS, sealed_receipt, select_receipts
from server.billing.receipts.signing import PublicKey
from server.billing.receipts.signing_keys import list_keys
from server.billing.tables import entries, holds, kept_events, statements, usage_events
from server.database.pages import pages

WINDOW = 20_000
"""Ids that one query looks at: about 10 ms on SQLite, far below any timeout."""

Row = Mapping[str, Any]


def check_entries(scope: Scope) -> Iterator[Finding]:
    """Check every entry with its event, tenant by tenant, in the order of each tenant's chain."""
    keys = {known.public.key_id: known.public for known in list_keys(scope.conn)}
    chain: _Chain | None = None
    entry = entries.c
    for page in pages(scope.conn, _select_entries(scope), entry.tenant_id, entry.receipt_seq):
        # A plain dict is read faster than the row.
        for row in map(dict[str, Any], page):
            if chain is None or chain.tenant_id != row["tenant_id"]:
                chain = _Chain.before(scope, row)
            yield from chain.follow(row)
            yield from _check_seal(row, keys)
            yield from _check_event(row)
            yield from _check_rating(row)
            yield from _check_correction(row)
            yield from _check_period(scope, row)
        num_events = sum(row["kind"] in ("usage", *KEPT_KINDS) for row in page)
        scope.count("receipts", len(page))
        scope.count("events", num_events)
        scope.count("rating", num_events)
        scope.count("corrections", sum(row["kind"] in UNDOING for row in page))


def check_events(scope: Scope) -> Iterator[Finding]:
    """Check that every event has an entry of its kind, and that a new one's hold has a row."""
    usage, kept = usage_events.c, kept_events.c
    is_lost = sa.or_(entries.c.entry_id.is_(None), entries.c.kind != "usage")
    # The last minute is for the time between this snapshot and the clock of who deletes.
    is_new = usage.posted_at_ms >= scope.now_ms - KEPT_MS + 60_000
    was_held = usage.hold_nanousd.is_not(None) & is_new
    columns = (usage.event_id, usage.request_id, usage.amount_nanousd)
    for first, last in id_windows(scope.conn, usage.event_id):
        is_here = usage.event_id.between(first, last)
        query = sa.select(*columns).outerjoin(entries, entries.c.entry_id == usage.event_id)
        for row in scope.conn.execute(query.where(is_here, is_lost)):
            yield Finding(
                "events",
                f"event {row.event_id} (request {row.request_id})",
                "has no entry",
                difference_nanousd=row.amount_nanousd,
            )
        query = sa.select(*columns).outerjoin(holds, holds.c.request_id == usage.request_id)
        for row in scope.conn.execute(query.where(is_here, was_held, holds.c.request_id.is_(None))):
            yield Finding("holds", f"hold {row.request_id}", "is gone; it has an event")
    is_lost = sa.or_(entries.c.entry_id.is_(None), entries.c.kind.not_in(KEPT_KINDS))
    for first, last in id_windows(scope.conn, kept.event_id):
        query = sa.select(kept.event_id).outerjoin(entries, entries.c.entry_id == kept.event_id)
        for event_id in scope.conn.scalars(
            query.where(kept.event_id.between(first, last), is_lost)
        ):
            yield Finding("events", f"event {event_id}", "has no entry")


def id_windows(conn: Connection, column: sa.Column[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive ranges of at most WINDOW ids, which together cover all."""
    first = conn.scalar(sa.select(sa.func.min(column)))
    while first is not None:
        page = sa.select(column).where(column >= first).order_by(column).limit(WINDOW).subquery()
        last = conn.scalar(sa.select(sa.func.max(page.c[column.name])))
        if last is None:
            return
        yield first, last
        first = last + 1


def entry_name(row: Row) -> str:
    of_request = f" (request {row['request_id']})" if row["request_id"] else ""
    return f"entry {row['entry_id']}{of_request}"


# ---- reading ----


def _select_entries(scope: Scope) -> sa.Select[Any]:
    """`select_receipts`, with the same values from the event and from the reversed entry."""
    reversed_entry = entries.alias()
    query = select_receipts().outerjoin(
        reversed_entry, reversed_entry.c.entry_id == entries.c.reverses_entry_id
    )
    if scope.since_ms:
        # All entries from the first one by number: clocks differ, and a chain has no gaps.
        first = sa.select(sa.func.min(entries.c.entry_id))
        first_id = scope.conn.scalar(first.where(entries.c.posted_at_ms >= scope.since_ms))
        query = query.where(entries.c.entry_id >= first_id)
    both = (usage_events, kept_events)
    return query.add_columns(
        sa.func.coalesce(*(table.c.event_id for table in both)).label("event_id"),
        sa.func.coalesce(*(table.c.tenant_id for table in both)).label("event_tenant_id"),
        usage_events.c.price_version.label("event_price_version"),
        usage_events.c.amount_nanousd.label("event_amount_nanousd"),
        usage_events.c.ended_at_ms.label("event_ended_at_ms"),
        usage_events.c.posted_at_ms.label("event_posted_at_ms"),
        *(
            reversed_entry.c[name].label(f"reversed_{name}")
            for name in ("tenant_id", "amount_nanousd", "debit_account", "credit_account")
        ),
    )


# ---- the checks of one entry ----


@dataclass(slots=True)
class _Chain:
    """The end of one tenant's chain of receipts, as far as it has been read."""

    tenant_id: str
    seq: int = 0
    sha256: str = GENESIS

    @classmethod
    def before(cls, scope: Scope, row: Row) -> "_Chain":
        """Return an empty chain, or with since_ms the chain up to the receipt before `row`."""
        tenant_id, seq = row["tenant_id"], row["receipt_seq"] - 1
        query = sa.select(entries.c.sha256).filter_by(tenant_id=tenant_id, receipt_seq=seq)
        if scope.since_ms and (sha256 := scope.conn.scalar(query)):
            return cls(tenant_id, seq, sha256)
        return cls(tenant_id)

    def follow(self, row: Row) -> Iterator[Finding]:
        seq, expected = row["receipt_seq"], self.seq + 1
        if seq != expected:
            yield Finding(
                "receipts",
                f"receipt {self.tenant_id}/{expected}",
                "is missing from the chain",
                expected=expected,
                found=seq,
            )
        elif row["prev_sha256"] != self.sha256:
            yield Finding(
                "receipts",
                entry_name(row),
                "prev_sha256 is not the sha256 of the receipt before",
                expected=self.sha256,
                found=row["prev_sha256"],
            )
        # The chain continues from the stated hash, so that one broken link is one finding.
        self.seq, self.sha256 = seq, row["sha256"]


def _check_seal(row: Row, keys: Mapping[str, PublicKey]) -> Iterator[Finding]:
    try:
        expected = sha256_of(sealed_receipt(row))
    except UNREADABLE as error:
        expected = f"cannot be made: {error}"
    yield from differences("receipts", entry_name(row), {"sha256": (expected, row["sha256"])})
    for name, fault in signature_faults(row["signing_key"], row["sha256"], row["signature"], keys):
        yield Finding("receipts", entry_name(row), f"{name}: {fault}")


def _check_event(row: Row) -> Iterator[Finding]:
    kind = row["kind"]
    if kind not in ("usage", *KEPT_KINDS):
        return
    subject = entry_name(row)
    if row["event_id"] is None:
        yield Finding("events", subject, "has no event", difference_nanousd=-row["amount_nanousd"])
        return
    pairs = {
        "debit_account": (tenant_account(row["tenant_id"]), row["debit_account"]),
        "credit_account": (f"revenue/{kind}", row["credit_account"]),
        "tenant_id": (row["event_tenant_id"], row["tenant_id"]),
    }
    if kind == "usage":
        pairs |= {
            name: (row[f"event_{name}"], row[name])
            for name in ("price_version", "amount_nanousd", "ended_at_ms", "posted_at_ms")
        }
    yield from differences("events", subject, pairs)


def _check_rating(row: Row) -> Iterator[Finding]:
    if row["event_id"] is None or row["kind"] not in ("usage", *KEPT_KINDS):
        return
    worth = _worth(row)
    if worth != row["amount_nanousd"]:
        yield Finding(
            "rating",
            entry_name(row),
            f"amount_nanousd is not what price version {row['price_version']} makes of it",
            expected=worth,
            found=row["amount_nanousd"],
            difference_nanousd=worth - row["amount_nanousd"],
        )


def _worth(row: Row) -> int:
    """Return the amount of the entry's event, computed from its counts and prices alone."""
    if row["price_version"] is None:
        return 0
    if row["kind"] != "usage":
        return kept_amount(row["size_bytes"], row["duration_ms"], row[f"{row['kind']}_nanousd"])
    return rate(row, TokenPrices.of(row)).total


def _check_correction(row: Row) -> Iterator[Finding]:
    if row["kind"] not in UNDOING and row["reverses_entry_id"] is None:
        return
    is_charge = str(row["reversed_credit_account"]).startswith("revenue/")
    expected = {
        "kind": "correction" if is_charge else "reversal",
        "tenant_id": row["reversed_tenant_id"],
        "amount_nanousd": row["reversed_amount_nanousd"],
        "debit_account": row["reversed_credit_account"],
        "credit_account": row["reversed_debit_account"],
    }
    pairs = {
        f"{name} does not reverse entry {row['reverses_entry_id']}": (value, row[name])
        for name, value in expected.items()
    }
    yield from differences("corrections", entry_name(row), pairs)


def _check_period(scope: Scope, row: Row) -> Iterator[Finding]:
    """Check an entry on a later month's statement: that of the month before must be issued."""
    try:
        month, before = month_of(row["ended_at_ms"]), month_before(row["period"])
    except UNREADABLE:
        return  # The entry's seal is broken, which `_check_seal` reports.
    if month > before:
        return
    query = sa.select(statements.c.period).filter_by(tenant_id=row["tenant_id"], period=before)
    if scope.conn.scalar(query) is None:
        yield Finding(
            "statements",
            f"statement {row['tenant_id']}/{before}",
            f"is gone; entry {row['entry_id']} was put on a later one",
        )
