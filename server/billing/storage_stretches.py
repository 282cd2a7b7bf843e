"""Stretches: bytes of an adapter that were kept somewhere for some time, and their entries.

A stretch says what was kept; its cost follows from it and the price at that time. Residency without
a price is summed by UTC day, since an engine reports what it has in any tier four times an hour.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.wire.records import ResidencyItem, ResidencyRecord
from registry.tables import adapter_versions
from server.billing.entries import Draft, insert_events, post_entries
from server.billing.prices import Price, prices_for
from server.billing.rating import kept_amount
from server.billing.receipts.receipt import Receipt
from server.billing.receipts.signing import Signer
from server.billing.tables import kept_events, residency_sums
from server.database.upsert import upsert
from server.text.times import DAY_MS

Kind = Literal["storage", "pinned", "resident"]
Tier = Literal["store", "device", "host", "disk"]

_OF_SUM = ("source_id", "started_at_ms", "at_ms", "duration_ms")
_COLUMNS = tuple(column.name for column in kept_events.c if column.name != "event_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bytes of an adapter that were kept in a tier.

    source, source_id: the origin of the stretch; unique, so that it is posted once.
    duration_ms: time kept in all, between started_at_ms and at_ms.
    at_ms: the last millisecond, so that the stretch belongs to the day and month it was kept in.
    is_free: whether the stretch is only metered and has no price.
    """

    kind: Kind
    source: str
    source_id: str
    tenant_id: str
    adapter_id: str | None
    adapter_version: int | None
    adapter_digest: str
    tier: Tier
    size_bytes: int
    slabs: int = 0
    started_at_ms: int
    at_ms: int
    duration_ms: int
    is_free: bool = False


def post_stretches(
    conn: Connection, signer: Signer, stretches: Sequence[Stretch], now_ms: int
) -> list[Receipt]:
    """Post the stretches that are not posted yet. Call it under the ledger's lock."""
    drafts = drafts_of(conn, stretches)
    receipts = post_entries(conn, signer, drafts, now_ms)
    insert_events(conn, kept_events, drafts, receipts, now_ms)
    return receipts


def drafts_of(conn: Connection, stretches: Sequence[Stretch]) -> list[Draft]:
    """Draft entries for stretches not posted yet, at the prices of their last millisecond."""
    fresh = _fresh(conn, stretches)
    prices = _prices(conn, fresh)
    return [_draft(stretch, prices.get(stretch.source_id)) for stretch in fresh]


def has_price(draft: Draft) -> bool:
    """Whether a draft for residency is at a price above 0; the others are summed by day."""
    return bool(draft.event["resident_nanousd"])


def residency_drafts(
    conn: Connection, engine_id: str, records: Sequence[ResidencyRecord]
) -> list[Draft]:
    """Draft entries for residency with a price, and add the rest to the sums of its days.

    Sums have no rows that would tell a replay: call it once for each record.
    """
    drafts = drafts_of(conn, residency_stretches(conn, engine_id, records)) if records else []
    if rows := [_sum_row(draft) for draft in drafts if not has_price(draft)]:
        insert = upsert(conn.dialect.name, residency_sums)
        total = residency_sums.c.duration_ms + insert.excluded.duration_ms
        later = {"duration_ms": total, "at_ms": insert.excluded.at_ms}
        conn.execute(insert.on_conflict_do_update(index_elements=["day", "kept"], set_=later), rows)
    return [draft for draft in drafts if has_price(draft)]


def _sum_row(draft: Draft) -> dict[str, Any]:
    kept = dict(draft.event) | {"kind": "resident", "at_ms": draft.at_ms}
    kept["is_free"] = kept.pop("resident_nanousd") is None
    kept["source_id"] = f"day/{kept['source_id']}"
    row = {name: kept.pop(name) for name in _OF_SUM}
    return row | {"day": draft.at_ms // DAY_MS, "kept": json.dumps(kept, sort_keys=True)}


def take_days(conn: Connection, before_day: int, limit: int) -> list[Stretch]:
    """Delete at most `limit` sums of days before a day, and return the stretch of each."""
    key = (residency_sums.c.day, residency_sums.c.kept)
    some = sa.select(*key).where(key[0] < before_day).order_by(*key).limit(limit)
    taken = sa.delete(residency_sums).where(sa.tuple_(*key).in_(some)).returning(residency_sums)
    rows = conn.execute(taken).mappings().all()
    return [Stretch(**json.loads(row["kept"]), **{n: row[n] for n in _OF_SUM}) for row in rows]


def residency_stretches(
    conn: Connection, engine_id: str, records: Sequence[ResidencyRecord]
) -> list[Stretch]:
    """Return stretches of an engine's adapters; only unpinned ones on the device have a price."""
    objects = {_object_of(item) for record in records for item in record.items}
    owners = _first_versions(conn, objects)
    stretches = []
    for record in records:
        for index, item in enumerate(record.items):
            # An object that never became a version has none.
            adapter_id, version = owners.get(_object_of(item), (None, None))
            stretch = Stretch(
                kind="resident",
                source=engine_id,
                source_id=f"{record.seq}/{index}",
                tenant_id=_object_of(item)[0],
                adapter_id=adapter_id,
                adapter_version=version,
                adapter_digest=item.digest,
                tier=item.tier,
                size_bytes=item.size_bytes,
                slabs=item.slabs,
                started_at_ms=round(record.started_at * 1000),
                at_ms=round(record.at * 1000),
                duration_ms=item.duration_ms,
                # A pin has its own charge; copies in other tiers are the server's choice, so free.
                is_free=item.tier != "device" or item.is_pinned,
            )
            stretches.append(stretch)
    return stretches


def _object_of(item: ResidencyItem) -> tuple[str, str]:
    """Return (tenant_id, digest), of which a tenant's object key is made."""
    return item.object_key.split("/")[1], item.digest


def _first_versions(
    conn: Connection, objects: set[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, int]]:
    """Return {(tenant_id, digest): (adapter_id, version)}: the version that created each object.

    The engine's own name is not used: an adapter that stayed warm since its proof has its upload's.
    """
    columns = adapter_versions.c
    query = sa.select(columns.tenant_id, columns.digest, columns.adapter_id, columns.version).where(
        columns.tenant_id.in_({tenant_id for tenant_id, _ in objects}),
        columns.digest.in_({digest for _, digest in objects}),
    )
    newest_first = (columns.created_at_ms.desc(), columns.adapter_id.desc(), columns.version.desc())
    rows = conn.execute(query.order_by(*newest_first))
    return {(row.tenant_id, row.digest): (row.adapter_id, row.version) for row in rows}


def _fresh(conn: Connection, stretches: Sequence[Stretch]) -> list[Stretch]:
    by_source = defaultdict(list)
    for stretch in stretches:
        by_source[stretch.source].append(stretch.source_id)
    posted: set[tuple[str, str]] = set()
    for source, ids in by_source.items():
        query = sa.select(kept_events.c.source_id).where(
            kept_events.c.source == source, kept_events.c.source_id.in_(ids)
        )
        posted |= {(source, source_id) for source_id in conn.scalars(query)}
    return [stretch for stretch in stretches if (stretch.source, stretch.source_id) not in posted]


def _prices(conn: Connection, stretches: Sequence[Stretch]) -> dict[str, Price]:
    """Return {source_id: price} of stretches with a price, by a few queries per tenant and time."""
    groups: dict[tuple[str, int], list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        if not stretch.is_free:
            groups[stretch.tenant_id, stretch.at_ms].append(stretch)
    prices: dict[str, Price] = {}
    for (tenant_id, at_ms), group in groups.items():
        # An object without a version has no price of its own: "" is the id of no adapter.
        ids = {stretch.adapter_id or "" for stretch in group}
        found = prices_for(conn, at_ms, tenant_id=tenant_id, adapter_ids=ids)
        prices |= {stretch.source_id: found[stretch.adapter_id or ""] for stretch in group}
    return prices


def _draft(stretch: Stretch, price: Price | None) -> Draft:
    gb_hour_nanousd = getattr(price, f"{stretch.kind}_nanousd") if price else None
    amount = kept_amount(stretch.size_bytes, stretch.duration_ms, gb_hour_nanousd or 0)
    return Draft.charge(
        stretch.kind,
        stretch.tenant_id,
        amount,
        at_ms=stretch.at_ms,
        price_version=price.price_version if price else None,
        event={name: getattr(stretch, name) for name in _COLUMNS}
        | {f"{stretch.kind}_nanousd": gb_hour_nanousd},
    )
