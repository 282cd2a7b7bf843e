"""Checks of holds: each ends once, as its event says, and none stays open that nothing can use."""

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from server.billing.audit.report import Finding, Scope, differences
from server.billing.rating import TokenPrices, amount_nanousd, is_free_error
from server.billing.receipts.rows import TOKEN_PRICES
from server.billing.tables import IS_OPEN, entries, holds, incidents, price_versions, usage_events
from server.database.pages import pages
from server.text.times import DAY_MS

_GRACE_MS = 60_000
"""Time after expiry in which an open hold is no finding.

A settler voids within seconds, but the engine's clock may differ from the database's.
"""
_LOST_MS = DAY_MS
"""Time after expiry at which an open hold is a finding even if nobody settles its journal."""

_SAME = (
    "tenant_id", "key_id", "model", "adapter_id", "adapter_version", "adapter_digest",
    "price_version", "engine_id",
)  # fmt: skip
_END = ("finish_reason", "stop_cause", "completion_tokens")
# Kinds of incident by name of difference: the settler recorded these when it posted the event, so
# the audit does not report them again.
_KNOWN_AS = {
    "state": "hold_voided",
    "engine_id": "engine_differs",
    "adapter_digest": "adapter_differs",
}

Row = Mapping[str, Any]


def check_holds(scope: Scope) -> Iterator[Finding]:
    """Compare every hold with its event and its price."""
    query = _select_holds()
    if scope.since_ms:
        query = query.where(holds.c.created_at_ms >= scope.since_ms)
    for page in pages(scope.conn, query, holds.c.request_id):
        for row in map(dict[str, Any], page):
            subject = f"hold {row['request_id']}"
            tokens, price = (row["num_prompt_tokens"], 0, row["token_lease"]), TokenPrices.of(row)
            amount = amount_nanousd(*tokens, price)
            pairs: dict[str, tuple[Any, Any]] = {"amount_nanousd": (amount, row["amount_nanousd"])}
            if row["event_id"] is not None:
                pairs |= _pairs(row)
            elif row["state"] == "posted":
                pairs["event"] = ("one", "none")
            for finding in differences("holds", subject, pairs):
                if not _is_known(scope, row["request_id"], finding.detail):
                    yield finding
        scope.count("holds", len(page))


def check_open_holds(scope: Scope) -> Iterator[Finding]:
    """Report holds that are open past their expiry though the engine's journal is settled past it.

    _LOST_MS after its expiry a hold is reported however far the journal is settled.
    """
    hold, usage = holds.c, usage_events.c
    # The engine's last event, by an index; a search for any later one would read all events.
    ends = sa.select(usage.ended_at_ms).where(usage.engine_id == hold.engine_id)
    last = ends.order_by(usage.journal_seq.desc()).limit(1).scalar_subquery()
    settled_past = last > hold.expires_at_ms + _GRACE_MS
    is_late = sa.or_(
        hold.expires_at_ms < scope.now_ms - _LOST_MS,
        sa.and_(hold.expires_at_ms < scope.now_ms - _GRACE_MS, settled_past),
    )
    query = sa.select(hold.request_id, hold.engine_id, hold.expires_at_ms).where(IS_OPEN, is_late)
    for page in pages(scope.conn, query, hold.request_id):
        for row in page:
            yield Finding(
                "open holds",
                f"hold {row['request_id']}",
                f"is open past its expiry, at engine {row['engine_id']}",
                expected=row["expires_at_ms"],
                found=scope.now_ms,
            )
    num_open = scope.conn.execute(sa.select(sa.func.count()).where(IS_OPEN)).scalar_one()
    scope.count("open holds", num_open)


def _select_holds() -> sa.Select[Any]:
    usage, price, correction = usage_events.c, price_versions.c, entries.alias()
    of_event = (*_SAME, *_END, "hold_nanousd", "is_failed", "posted_at_ms")
    columns = [usage[name].label(f"event_{name}") for name in of_event]
    joined = holds.outerjoin(usage_events, usage.request_id == holds.c.request_id)
    joined = joined.join(price_versions, price.price_version == holds.c.price_version)
    joined = joined.outerjoin(correction, correction.c.reverses_entry_id == usage.event_id)
    return sa.select(
        holds,
        usage.event_id,
        usage.amount_nanousd.label("event_amount_nanousd"),
        *columns,
        *(price[name] for name in TOKEN_PRICES),
        correction.c.entry_id.label("correction_id"),
    ).select_from(joined)


def _pairs(row: Row) -> dict[str, tuple[Any, Any]]:
    """Return the values that a hold and its event must share, as (expected, found) by name."""
    is_free = row["event_amount_nanousd"] == 0 or row["correction_id"] is not None
    pairs = {name: (row[f"event_{name}"], row[name]) for name in _SAME}
    pairs |= {
        "state": ("posted", row["state"]),
        "hold_nanousd": (row["event_hold_nanousd"], row["amount_nanousd"]),
    }
    if row["state"] == "posted":
        pairs["resolved_at_ms"] = (row["event_posted_at_ms"], row["resolved_at_ms"])
    if row["failed_at_ms"] is not None:
        pairs["what failed is free"] = (True, is_free)
    elif not is_free_error(*(row[f"event_{name}"] for name in _END)):
        pairs["is_failed"] = (bool(row["event_is_failed"]), False)
    return pairs


def _is_known(scope: Scope, request_id: str, name: str) -> bool:
    if (kind := _KNOWN_AS.get(name)) is None:
        return False
    query = sa.select(incidents.c.incident_id).filter_by(request_id=request_id, kind=kind)
    return scope.conn.scalar(query.limit(1)) is not None
