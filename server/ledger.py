"""Holds, and what became of them: every request's money, in the transactions that decide it.

A hold is written before its request is sent to an engine, and ends once: posted with the usage
event of the engine's end record, or voided when that engine can no longer end it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from engine.messages import CANARY, EndRecord, ResidencyRecord
from server.prices import TokenPrices, rated_nanousd
from server.tables import holds, incidents, journal_positions, price_versions, usage_events

HoldState = Literal["open", "posted", "voided"]

MAX_VOIDED_AT_ONCE = 500

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a request may cost, reserved: its prompt and `token_lease` completion tokens.

    model: the name that was asked for.   expires_at_ms: past the request's deadline in the engine.
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    price_version: int
    amount_nanousd: int
    num_prompt_tokens: int
    token_lease: int
    engine_id: str
    created_at_ms: int
    expires_at_ms: int
    adapter_id: str | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None
    state: HoldState = "open"
    resolved_at_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostResult:
    """posted: new usage events.   replayed: records that were posted before.

    settled_seq: the engine's journal is in the ledger up to here.
    """

    posted: int
    replayed: int
    incidents: int
    settled_seq: int


def insert_hold(conn: Connection, hold: Hold) -> None:
    """Open a hold; its request may be sent once this is committed."""
    conn.execute(sa.insert(holds).values(**_fields(hold)))


def extend_hold(
    conn: Connection, request_id: str, *, token_lease: int, amount_nanousd: int
) -> bool:
    """Cover `token_lease` completion tokens in all. False when the hold is no longer open."""
    query = sa.update(holds).where(holds.c.request_id == request_id, holds.c.state == "open")
    query = query.values(token_lease=token_lease, amount_nanousd=amount_nanousd)
    return conn.execute(query).rowcount == 1


def void_refused(conn: Connection, request_id: str, now_ms: int) -> bool:
    """Void a hold whose request was never sent, or was refused by the engine's own word.

    Never after an engine died or fell silent: it may have journaled the request. False when the
    hold is no longer open.
    """
    return _resolve(conn, [request_id], "voided", now_ms) == 1


def get_hold(conn: Connection, request_id: str) -> Hold | None:
    row = conn.execute(sa.select(holds).where(holds.c.request_id == request_id)).first()
    return Hold(**row._mapping) if row else None


def settled_seq(conn: Connection, engine_id: str) -> int:
    """How far this engine's journal is posted; 0 before its first record."""
    query = sa.select(journal_positions.c.settled_seq)
    return conn.scalar(query.where(journal_positions.c.engine_id == engine_id)) or 0


def post(
    conn: Connection,
    engine_id: str,
    records: Sequence[EndRecord | ResidencyRecord],
    now_ms: int,
) -> PostResult:
    """Post end records, oldest first: usage events, holds, position, in this one transaction.

    The same records again change nothing. A record that does not fit its hold is posted all the
    same, with an incident beside it: usage is never dropped.
    """
    position = _lock_position(conn, engine_id, now_ms)
    ends = [record for record in records if isinstance(record, EndRecord)]
    fresh, incidents_found = _split_replays(conn, engine_id, ends)
    by_id = _lock_holds(conn, [record.request_id for record in fresh])
    prices = _prices(conn, {hold.price_version for hold in by_id.values()})
    events = []
    for record in fresh:
        hold = by_id.get(record.request_id)
        price = prices[hold.price_version] if hold else None
        event = _event(engine_id, record, hold, price, now_ms)
        events.append(event)
        incidents_found += _doubts(engine_id, record, hold, event["amount_nanousd"])
    if events:
        conn.execute(sa.insert(usage_events), events)
    open_ids = [hold.request_id for hold in by_id.values() if hold.state == "open"]
    resolved = _resolve(conn, open_ids, "posted", now_ms)
    assert resolved == len(open_ids), "a locked hold changed under its lock"
    num_incidents = _record_new(conn, incidents_found, now_ms)
    settled = max([position, *(record.seq for record in records)])
    if settled > position:
        _move_position(conn, engine_id, settled, now_ms)
    return PostResult(
        posted=len(fresh),
        replayed=len(ends) - len(fresh),
        incidents=num_incidents,
        settled_seq=settled,
    )


def void_expired(
    conn: Connection,
    engine_id: str,
    *,
    as_of_ms: int,
    still_open: Collection[str],
    now_ms: int,
) -> list[str]:
    """Void this engine's holds that expired before `as_of_ms` and can no longer be used.

    Call it only with a complete journal read that began after `as_of_ms` and is posted: what has
    expired, is not open in the engine and has no end record, never will have one.
    """
    query = sa.select(holds.c.request_id).where(
        holds.c.engine_id == engine_id, holds.c.state == "open", holds.c.expires_at_ms < as_of_ms
    )
    if still_open:
        query = query.where(holds.c.request_id.not_in(still_open))
    query = query.order_by(holds.c.expires_at_ms).limit(MAX_VOIDED_AT_ONCE).with_for_update()
    expired = list(conn.scalars(query))
    _resolve(conn, expired, "voided", now_ms)
    return expired


def record_incident(
    conn: Connection,
    *,
    at_ms: int,
    kind: str,
    detail: str,
    engine_id: str | None = None,
    request_id: str | None = None,
) -> None:
    """One thing that should not have happened, in the transaction that found it."""
    conn.execute(
        sa.insert(incidents).values(
            at_ms=at_ms, kind=kind, engine_id=engine_id, request_id=request_id, detail=detail
        )
    )


def _lock_position(conn: Connection, engine_id: str, now_ms: int) -> int:
    """This engine's position, locked: a second settler waits here and then sees our events."""
    query = sa.select(journal_positions.c.settled_seq).where(
        journal_positions.c.engine_id == engine_id
    )
    position = conn.scalar(query.with_for_update())
    if position is not None:
        return position
    values = {"engine_id": engine_id, "settled_seq": 0, "updated_at_ms": now_ms}
    insert = _INSERT[conn.dialect.name]
    conn.execute(insert(journal_positions).values(**values).on_conflict_do_nothing())
    position = conn.scalar(query.with_for_update())
    assert position is not None
    return position


def _move_position(conn: Connection, engine_id: str, settled: int, now_ms: int) -> None:
    query = sa.update(journal_positions).where(journal_positions.c.engine_id == engine_id)
    conn.execute(query.values(settled_seq=settled, updated_at_ms=now_ms))


def _split_replays(
    conn: Connection, engine_id: str, records: Sequence[EndRecord]
) -> tuple[list[EndRecord], list[dict[str, Any]]]:
    """The records not posted yet, and an incident for each that contradicts a posted one."""
    posted = usage_events.c
    query = sa.select(posted.engine_id, posted.journal_seq, posted.request_id)
    seqs, ids = [r.seq for r in records], [r.request_id for r in records]
    rows = conn.execute(query.where(posted.engine_id == engine_id, posted.journal_seq.in_(seqs)))
    by_seq = {row.journal_seq: row.request_id for row in rows}
    rows = conn.execute(query.where(posted.request_id.in_(ids)))
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


def _lock_holds(conn: Connection, request_ids: list[str]) -> dict[str, Hold]:
    # In one order: two settlers that lock the same holds must not deadlock.
    query = sa.select(holds).where(holds.c.request_id.in_(request_ids))
    rows = conn.execute(query.order_by(holds.c.request_id).with_for_update())
    return {row.request_id: Hold(**row._mapping) for row in rows}


def _prices(conn: Connection, versions: set[int]) -> dict[int, TokenPrices]:
    query = sa.select(price_versions).where(price_versions.c.price_version.in_(versions))
    return {
        row.price_version: TokenPrices(
            prompt_nanousd=row.prompt_nanousd,
            cached_nanousd=row.cached_nanousd,
            completion_nanousd=row.completion_nanousd,
        )
        for row in conn.execute(query)
    }


def _event(
    engine_id: str, record: EndRecord, hold: Hold | None, price: TokenPrices | None, now_ms: int
) -> dict[str, Any]:
    """The usage event: who and what was asked from the hold, what ran from the record."""
    amount = 0
    if price is not None and _adds_up(record):
        amount = rated_nanousd(
            record.finish_reason,
            record.stop_cause,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_completion_tokens,
            price,
        )
    return {
        "engine_id": engine_id,
        "journal_seq": record.seq,
        "request_id": record.request_id,
        "tenant_id": hold.tenant_id if hold else record.tenant_id,
        "key_id": hold.key_id if hold else None,
        "model": hold.model if hold else None,
        "adapter_id": hold.adapter_id if hold else None,
        "adapter_version": hold.adapter_version if hold else None,
        "adapter_digest": record.adapter_digest,
        "base_revision": record.base_revision,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "completion_tokens": record.num_completion_tokens,
        "finish_reason": record.finish_reason,
        "stop_cause": record.stop_cause,
        "output_sha256": record.output_sha256,
        "price_version": hold.price_version if hold else None,
        "amount_nanousd": amount,
        "started_at_ms": _ms(record.started_at),
        "first_token_at_ms": None if record.first_token_at is None else _ms(record.first_token_at),
        "ended_at_ms": _ms(record.at),
        "posted_at_ms": now_ms,
    }


def _doubts(
    engine_id: str, record: EndRecord, hold: Hold | None, amount: int
) -> list[dict[str, Any]]:
    """What does not fit between a record and its hold."""
    if hold is None and record.tenant_id == CANARY:
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
    if not _adds_up(record):
        found.append(_incident("counts_differ", engine_id, record, record.num_cached_tokens))
    if amount > hold.amount_nanousd:
        pair = (hold.amount_nanousd, amount)
        found.append(_incident("amount_over_hold", engine_id, record, pair))
    return found


def _adds_up(record: EndRecord) -> bool:
    """Whether the counts can be priced; if not, a person has to look and nobody is charged."""
    return (
        0 <= record.num_cached_tokens <= record.num_prompt_tokens
        and record.num_completion_tokens >= 0
    )


def _incident(kind: str, engine_id: str, record: EndRecord, detail: object) -> dict[str, Any]:
    return {
        "kind": kind,
        "engine_id": engine_id,
        "request_id": record.request_id,
        "detail": f"journal seq {record.seq}: {detail}",
    }


def _record_new(conn: Connection, found: list[dict[str, Any]], now_ms: int) -> int:
    """Write the incidents that are not known yet, for a replay changes nothing; how many."""
    count = 0
    for incident in found:
        same = [incidents.c[name] == incident[name] for name in ("kind", "engine_id", "request_id")]
        if conn.scalar(sa.select(incidents.c.incident_id).where(*same).limit(1)) is None:
            record_incident(conn, at_ms=now_ms, **incident)
            count += 1
    return count


def _resolve(conn: Connection, request_ids: list[str], state: HoldState, now_ms: int) -> int:
    """The terminal transition of open holds; how many were open."""
    if not request_ids:
        return 0
    query = sa.update(holds).where(holds.c.request_id.in_(request_ids), holds.c.state == "open")
    return conn.execute(query.values(state=state, resolved_at_ms=now_ms)).rowcount


def _fields(hold: Hold) -> Mapping[str, Any]:
    return {field.name: getattr(hold, field.name) for field in dataclasses.fields(hold)}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
