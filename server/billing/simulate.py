"""Computes the cost of a past time under other prices, without writing to the ledger.

Tokens are priced by their sums, since a price is linear in them. Storage is rounded by event, so
equal events are counted and priced once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.tables import adapter_versions
from server.accounts.tables import tenants
from server.billing.prices import Price, Scope, get_prices
from server.billing.rating import Prices, kept_amount, rate
from server.billing.receipts.receipt import EntryKind, tenant_account
from server.billing.receipts.rows import KEPT_KINDS, is_tenants
from server.billing.tables import base_revisions, entries, holds, kept_events, usage_events
from server.database.database import Database

BookScope = Scope | Literal["base"]

WINDOW = 20_000
"""Ids that one query looks at: 0.1 s on SQLite, far below any timeout."""


Book = Mapping[tuple[BookScope, str], Mapping[str, int]]
"""Prices to try, by scope and scope id ("" for the default); a scope may name some prices only.

The scope `base` is a base model for everybody; its id is the model's name. The narrowest scope that
names a price decides it; a price that no scope names stays as it was.
"""


@dataclass(slots=True)
class Line:
    """Sums over one tenant's entries of one kind; amounts that it is charged are positive."""

    tenant_id: str
    tenant_name: str | None
    kind: EntryKind
    num_entries: int = 0
    actual_nanousd: int = 0
    simulated_nanousd: int = 0

    @property
    def difference_nanousd(self) -> int:
        return self.simulated_nanousd - self.actual_nanousd


async def simulate(
    database: Database,
    book: Book,
    start_ms: int,
    end_ms: int,
    tenant_id: str | None = None,
    window: int = WINDOW,
) -> list[Line]:
    """Price all entries that ended in [start, end), of one or all tenants; by tenant and kind.

    Raises LedgerUnavailable.
    """
    query = _groups(start_ms, end_ms, tenant_id)
    lines: dict[tuple[str, str], Line] = {}
    last_id = await database.read(lambda conn: conn.scalar(sa.func.max(entries.c.entry_id)))
    for first in range(1, (last_id or 0) + 1, window):

        def add_window(conn: Connection, first: int = first) -> None:
            ids = {"first": first, "last": min(first + window - 1, last_id or 0)}
            rows = conn.execute(query, ids).mappings().all()
            prices = get_prices(conn, {row["price_version"] for row in rows} - {None})
            for row in rows:
                key = row["tenant_id"], row["kind"]
                line = lines.setdefault(key, Line(key[0], row["tenant_name"], key[1]))
                sign = 1 if row["is_charge"] else -1
                line.num_entries += row["num_entries"]
                line.actual_nanousd += sign * int(row["amount_nanousd"])
                line.simulated_nanousd += sign * _worth(book, row, prices)

        await database.read(add_window)
    return [lines[key] for key in sorted(lines)]


def _worth(book: Book, row: sa.RowMapping, prices: Mapping[int, Price]) -> int:
    """Return the simulated amount of a group; one that undoes an entry has that entry's."""
    if row["of_kind"] not in ("usage", *KEPT_KINDS):
        return int(row["amount_nanousd"])
    if row["price_version"] is None:
        return 0  # Charged to nobody: a proof, or the residency of a pinned adapter.
    price = _price(book, prices[row["price_version"]], row)
    if row["of_kind"] == "usage":
        return rate(dict(row), price).total if row["adds_up"] else 0
    gb_hour_nanousd: int = getattr(price, f"{row['of_kind']}_nanousd")
    each = kept_amount(row["size_bytes"], row["duration_ms"], gb_hour_nanousd)
    return int(row["num_entries"]) * each


def _price(book: Book, actual: Prices, row: sa.RowMapping) -> Prices:
    """Return the prices of a group of entries.   actual: those that were charged."""
    owners: tuple[tuple[BookScope, str], ...] = (
        ("default", ""), ("plan", row["plan"]), ("tenant", row["tenant_id"]),
        ("base", row["base_model"]), ("adapter", row["adapter_id"]),
    )  # fmt: skip
    changes: dict[str, int] = {}
    for owner in owners:
        changes |= book.get(owner, {})
    return replace(actual, **changes)


def _groups(start_ms: int, end_ms: int, tenant_id: str | None) -> sa.Select[Any]:
    """Select the entries of a window of ids, grouped if they differ only in amounts and tokens."""
    entry, usage, kept = entries.c, usage_events.c, kept_events.c
    reversed_entry = entries.alias("reversed_entry")
    of_id = sa.func.coalesce(entry.reverses_entry_id, entry.entry_id)
    # A request that was free when its failure was noted has no correction; its hold has the note.
    is_late_failure = holds.c.failed_at_ms.is_not(None)
    keys = {
        "tenant_id": entry.tenant_id,
        "tenant_name": tenants.c.name,
        "plan": tenants.c.plan,
        "kind": entry.kind,
        "of_kind": sa.func.coalesce(reversed_entry.c.kind, entry.kind),
        "is_charge": entry.debit_account == sa.literal(tenant_account("")) + entry.tenant_id,
        "price_version": sa.func.coalesce(reversed_entry.c.price_version, entry.price_version),
        "adapter_id": sa.func.coalesce(usage.adapter_id, kept.adapter_id),
        "base_model": base_revisions.c.base_model,
        "finish_reason": usage.finish_reason,
        "stop_cause": usage.stop_cause,
        "is_failed": sa.or_(usage.is_failed, is_late_failure),
        "adds_up": sa.and_(usage.cached_tokens >= 0, usage.cached_tokens <= usage.prompt_tokens),
        "is_unanswered": usage.completion_tokens == 0,
        "size_bytes": kept.size_bytes,
        "duration_ms": kept.duration_ms,
    }
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    query = sa.select(
        *(column.label(name) for name, column in keys.items()),
        *(sa.func.sum(usage[name]).label(name) for name in names),
        sa.func.sum(entry.amount_nanousd).label("amount_nanousd"),
        sa.func.count().label("num_entries"),
    )
    joined = entries.outerjoin(reversed_entry, reversed_entry.c.entry_id == entry.reverses_entry_id)
    joined = joined.outerjoin(usage_events, usage.event_id == of_id)
    joined = joined.outerjoin(kept_events, kept.event_id == of_id)
    is_kept = (kept.adapter_id == adapter_versions.c.adapter_id) & (
        kept.adapter_version == adapter_versions.c.version
    )
    joined = joined.outerjoin(adapter_versions, is_kept)
    revision = sa.func.coalesce(usage.base_revision, adapter_versions.c.base_variant)
    joined = joined.outerjoin(base_revisions, base_revisions.c.base_revision == revision)
    joined = joined.outerjoin(tenants, tenants.c.tenant_id == entry.tenant_id)
    was_free = (holds.c.request_id == usage.request_id) & (entry.amount_nanousd == 0)
    joined = joined.outerjoin(holds, was_free)
    query = query.select_from(joined).where(
        entry.entry_id.between(sa.bindparam("first"), sa.bindparam("last")),
        entry.at_ms >= start_ms,
        entry.at_ms < end_ms,
        is_tenants(entry.tenant_id),
    )
    if tenant_id is not None:
        query = query.where(entry.tenant_id == tenant_id)
    # Grouped by column number: PostgreSQL does not recognize a repeated key that has parameters.
    return query.group_by(*(sa.text(str(number)) for number in range(1, len(keys) + 1)))
