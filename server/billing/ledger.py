"""The ledger: engines' end records become usage events, entries and receipts.

One transaction posts a whole group of records: the events, their entries, the end of their holds,
and how far the engine's journal is settled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.wire.messages import PROOF_TENANT
from engine.wire.records import EndRecord, ResidencyRecord
from server.billing.entries import Draft, insert_events, lock_ledger, post_entries
from server.billing.holds import Hold, lock_holds, note_failed, resolve
from server.billing.incidents import record_incident
from server.billing.prices import get_prices
from server.billing.rating import FREE, TokenPrices, adds_up, is_free_error, rate
from server.billing.receipts.receipt import CHARGES, Receipt
from server.billing.receipts.rows import TOKEN_PRICES
from server.billing.receipts.signing import Signer
from server.billing.storage_stretches import residency_drafts
from server.billing.tables import entries, journal_positions, kept_events, usage_events
from server.database.upsert import upsert

# Built once, since building a statement takes as long as running it.
_POSITION = sa.select(journal_positions.c.settled_seq).where(
    journal_positions.c.engine_id == sa.bindparam("engine")
)
_LOCKED_POSITION = _POSITION.with_for_update()
_POSTED = sa.select(usage_events.c.engine_id, usage_events.c.journal_seq, usage_events.c.request_id)
_POSTED_BY_SEQ = _POSTED.where(
    usage_events.c.engine_id == sa.bindparam("engine"),
    usage_events.c.journal_seq.in_(sa.bindparam("seqs", expanding=True)),
)
_POSTED_BY_ID = _POSTED.where(usage_events.c.request_id.in_(sa.bindparam("ids", expanding=True)))
_OF_HOLD = ("key_id", "model", "adapter_id", "adapter_version", "price_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostResult:
    """Counts of one posting.

    posted: new usage events.
    incidents: new incidents.   settled_seq: last record of the engine's journal in the ledger.
    traceparents: places in their traces of the new events' requests that are traced.
    """

    posted: int
    incidents: int
    settled_seq: int
    traceparents: tuple[str, ...] = ()


def settled_seq(conn: Connection, engine_id: str) -> int:
    """Return how far this engine's journal is posted; 0 before its first record."""
    return conn.scalar(_POSITION, {"engine": engine_id}) or 0


def post(
    conn: Connection,
    signer: Signer,
    engine_id: str,
    records: Sequence[EndRecord | ResidencyRecord],
    now_ms: int,
) -> PostResult:
    """Post records of a journal in this transaction: end records, oldest first, then residency.

    Posting the same records again changes nothing. A record that does not fit its hold is posted
    as well, with an incident: usage is never dropped.
    """
    # The ledger is locked before the holds, everywhere in this order, to avoid deadlocks.
    lock_ledger(conn)
    position = _lock_position(conn, engine_id, now_ms)
    ends = [record for record in records if isinstance(record, EndRecord)]
    stays = [r for r in records if isinstance(r, ResidencyRecord) and r.seq > position]
    fresh, incidents_found = _split_replays(conn, engine_id, ends)
    by_id = lock_holds(conn, [record.request_id for record in fresh])
    prices = get_prices(conn, {hold.price_version for hold in by_id.values()})
    drafts: list[Draft] = []
    for record in fresh:
        hold = by_id.get(record.request_id)
        draft = _draft(engine_id, record, hold, prices.get(hold.price_version) if hold else None)
        drafts.append(draft)
        incidents_found += _doubts(engine_id, record, hold, draft.amount_nanousd)
    kept = residency_drafts(conn, engine_id, stays)
    receipts = post_entries(conn, signer, [*drafts, *kept], now_ms)
    insert_events(conn, usage_events, drafts, receipts[: len(drafts)], now_ms)
    insert_events(conn, kept_events, kept, receipts[len(drafts) :], now_ms)
    open_ids = [hold.request_id for hold in by_id.values() if hold.state == "open"]
    resolved = resolve(conn, open_ids, "posted", now_ms)
    assert resolved == len(open_ids), "a locked hold changed under its lock"
    same = ("kind", "engine_id", "request_id")  # a replay records none
    are_new = [record_incident(conn, at_ms=now_ms, same=same, **it) for it in incidents_found]
    settled = max([position, *(record.seq for record in records)])
    if settled > position:
        _move_position(conn, engine_id, ends, settled, now_ms)
    return PostResult(
        posted=len(fresh),
        incidents=sum(are_new),
        settled_seq=settled,
        traceparents=tuple(hold.traceparent for hold in by_id.values() if hold.traceparent),
    )


def mark_failed(conn: Connection, signer: Signer, request_id: str, now_ms: int) -> Receipt | None:
    """Note that the gateway answers this request with a server error, so that it costs nothing.

    A charge that is posted already is reversed by a correction. Returns its receipt, or None.
    """
    lock_ledger(conn)
    note_failed(conn, request_id, now_ms)
    # The event says whether it is posted, since its hold may be deleted before a late note.
    query = sa.select(usage_events.c.event_id).where(usage_events.c.request_id == request_id)
    if (event_id := conn.scalar(query)) is None:
        return None
    return reverse(conn, signer, event_id, memo="answered with an error", now_ms=now_ms)


def reverse(
    conn: Connection,
    signer: Signer,
    entry_id: int,
    *,
    memo: str | None,
    now_ms: int,
    idempotency_key: str | None = None,
) -> Receipt | None:
    """Undo an entry by posting its opposite; None if that was done before or the amount is 0.

    A charge is undone by a correction, a credit or a payment by a reversal, which is no spend. Both
    have the time of the entry, and are on the statement of that month, or on the first one that is
    not issued.
    """
    row = conn.execute(sa.select(entries).where(entries.c.entry_id == entry_id)).one()
    query = sa.select(entries.c.entry_id).where(entries.c.reverses_entry_id == entry_id)
    if row.amount_nanousd == 0 or conn.scalar(query) is not None:
        return None
    draft = Draft(
        kind="correction" if row.kind in CHARGES else "reversal",
        tenant_id=row.tenant_id,
        debit_account=row.credit_account,
        credit_account=row.debit_account,
        amount_nanousd=row.amount_nanousd,
        at_ms=row.at_ms,
        reverses_entry_id=entry_id,
        memo=memo,
        idempotency_key=idempotency_key,
    )
    return post_entries(conn, signer, [draft], now_ms)[0]


def _lock_position(conn: Connection, engine_id: str, now_ms: int) -> int:
    """Lock and return this engine's position: a second settler waits here, then sees our events."""
    position: int | None = conn.scalar(_LOCKED_POSITION, {"engine": engine_id})
    if position is not None:
        return position
    values = {"engine_id": engine_id, "settled_seq": 0, "updated_at_ms": now_ms}
    insert = upsert(conn.dialect.name, journal_positions)
    conn.execute(insert.values(**values).on_conflict_do_nothing())
    made: int | None = conn.scalar(_LOCKED_POSITION, {"engine": engine_id})
    assert made is not None
    return made


def _move_position(
    conn: Connection, engine_id: str, ends: Sequence[EndRecord], settled: int, now_ms: int
) -> None:
    totals = {}
    if ends:
        totals = {
            "num_ends": ends[-1].number,
            "prompt_tokens": ends[-1].total_prompt_tokens,
            "cached_tokens": ends[-1].total_cached_tokens,
            "completion_tokens": ends[-1].total_completion_tokens,
        }
    query = sa.update(journal_positions).where(journal_positions.c.engine_id == engine_id)
    conn.execute(query.values(settled_seq=settled, updated_at_ms=now_ms, **totals))


def _split_replays(
    conn: Connection, engine_id: str, records: Sequence[EndRecord]
) -> tuple[list[EndRecord], list[dict[str, Any]]]:
    """Return the records not posted yet, and an incident for each that contradicts a posted one."""
    seqs, ids = [r.seq for r in records], [r.request_id for r in records]
    rows = conn.execute(_POSTED_BY_SEQ, {"engine": engine_id, "seqs": seqs})
    by_seq = {row.journal_seq: row.request_id for row in rows}
    rows = conn.execute(_POSTED_BY_ID, {"ids": ids})
    by_request = {row.request_id: (row.engine_id, row.journal_seq) for row in rows}
    fresh: list[EndRecord] = []
    found: list[dict[str, Any]] = []
    for record in records:
        place = (engine_id, record.seq)
        if by_seq.get(record.seq, record.request_id) != record.request_id:
            found.append(_incident("journal_conflict", engine_id, record, by_seq[record.seq]))
        elif by_request.get(record.request_id, place) != place:
            found.append(_incident("ended_twice", engine_id, record, by_request[record.request_id]))
        elif record.seq not in by_seq:
            by_seq[record.seq] = record.request_id
            by_request[record.request_id] = place
            fresh.append(record)
    return fresh, found


def _draft(
    engine_id: str, record: EndRecord, hold: Hold | None, price: TokenPrices | None
) -> Draft:
    """Draft the charge for one record: tenant and model from the hold, counts from the record."""
    event = event_of(record) | {
        "engine_id": engine_id,
        "journal_seq": record.seq,
        "tenant_id": hold.tenant_id if hold else record.tenant_id,
        "is_failed": bool(hold and hold.failed_at_ms is not None)
        or is_free_error(record.finish_reason, record.stop_cause, record.num_completion_tokens),
        "hold_nanousd": hold.amount_nanousd if hold else None,
        **{name: getattr(hold, name, None) for name in _OF_HOLD},
        **{name: getattr(price, name, None) for name in TOKEN_PRICES},
    }
    parts = rate(event, price) if price else FREE
    return Draft.charge(
        "usage",
        event["tenant_id"],
        parts.total,
        at_ms=event["ended_at_ms"],
        price_version=event["price_version"],
        event=event,
        parts=parts,
    )


def event_of(record: EndRecord) -> dict[str, Any]:
    """Return the columns of usage_events that an end record determines."""
    return {
        "number": record.number,
        "request_id": record.request_id,
        "adapter_digest": record.adapter_digest,
        "base_revision": record.base_revision,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "completion_tokens": record.num_completion_tokens,
        "finish_reason": record.finish_reason,
        "stop_cause": record.stop_cause,
        "output_sha256": record.output_sha256,
        "started_at_ms": _ms(record.started_at),
        "first_token_at_ms": _ms(record.first_token_at),
        "ended_at_ms": _ms(record.at),
        "load_ms": _ms(record.load_s),
        "load_tier": record.load_tier,
        "queue_ms": _ms(record.queue_s),
    }


def _doubts(
    engine_id: str, record: EndRecord, hold: Hold | None, amount: int
) -> list[dict[str, Any]]:
    """Return an incident for each difference between a record and its hold."""
    if hold is None and record.tenant_id == PROOF_TENANT:
        return []
    if hold is None:
        return [_incident("end_without_hold", engine_id, record, record.tenant_id)]
    pairs = {
        "hold_voided": (hold.state, "open"),
        "engine_differs": (hold.engine_id, engine_id),
        "tenant_differs": (hold.tenant_id, record.tenant_id),
        "adapter_differs": (hold.adapter_digest, record.adapter_digest),
    }
    found = [
        _incident(kind, engine_id, record, pair)
        for kind, pair in pairs.items()
        if pair[0] != pair[1]
    ]
    if not adds_up(
        record.num_prompt_tokens, record.num_cached_tokens, record.num_completion_tokens
    ):
        found.append(_incident("counts_differ", engine_id, record, record.num_cached_tokens))
    if amount > hold.amount_nanousd:
        pair = (hold.amount_nanousd, amount)
        found.append(_incident("amount_over_hold", engine_id, record, pair))
    return found


def _incident(kind: str, engine_id: str, record: EndRecord, detail: object) -> dict[str, Any]:
    return {
        "kind": kind,
        "engine_id": engine_id,
        "request_id": record.request_id,
        "detail": f"journal seq {record.seq}: {detail}",
    }


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
