"""The requests that are in the ledger: ids and figures, never what was said.

A page of a tenant's reads entries by the tenant's index of time, and looks at a bounded number of
them, however few of them meet the conditions. The slowest of all tenants' are sought among a
bounded number of the newest events, by their primary key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.billing.receipts.rows import is_tenants
from server.billing.tables import entries, usage_events

MAX_LOOKED_AT = 2000
"""Entries that are looked at for one page."""
MAX_COMPARED = 5000
"""Newest events among which the slowest are sought."""

Outcome = Literal["served", "failed", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Conditions for requests; a request must meet all that are set.

    model: a name in requests; the name of an adapter includes its aliases and versions.
    """

    model: str | None = None
    key_id: str | None = None
    outcome: Outcome | None = None
    start_ms: int = 0
    end_ms: int = 2**62

    def is_met(self, row: RowMapping) -> bool:
        model = row["model"] or ""
        is_asked = self.model is None or model == self.model or model.startswith(f"{self.model}@")
        is_asked = is_asked and (self.key_id is None or row["key_id"] == self.key_id)
        return is_asked and self.outcome in (None, outcome_of(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A request and its figures.

    load_tier: where its adapter was, if it waited for one.   load_ms, queue_ms: its waits for the
    adapter, and for its turn after that; None if its engine died in it.   The first token
    came at first_token_at_ms, if there was one.
    """

    request_id: str
    tenant_id: str
    engine_id: str
    receipt_seq: int
    key_id: str | None
    model: str
    adapter_version: int | None
    adapter_digest: str | None
    outcome: Outcome
    finish_reason: str
    stop_cause: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_nanousd: int
    load_tier: str | None
    load_ms: int | None
    queue_ms: int | None
    started_at_ms: int
    first_token_at_ms: int | None
    ended_at_ms: int

    @property
    def duration_ms(self) -> int:
        return self.ended_at_ms - self.started_at_ms

    @property
    def ttft_ms(self) -> int | None:
        """Milliseconds from the request's arrival at the engine to its first token."""
        first = self.first_token_at_ms
        return None if first is None else first - self.started_at_ms

    @property
    def itl_ms(self) -> float | None:
        """Mean milliseconds between tokens."""
        if self.first_token_at_ms is None or self.completion_tokens < 2:
            return None
        return (self.ended_at_ms - self.first_token_at_ms) / (self.completion_tokens - 1)

    def phases(self) -> Iterator[tuple[str, int]]:
        """Yield the phases of the request and their milliseconds, in order."""
        load_ms, queue_ms = self.load_ms or 0, self.queue_ms or 0
        if self.load_ms is not None:
            yield f"adapter from {self.load_tier or 'a tier'}", load_ms
        if self.queue_ms is not None:
            yield "queue", queue_ms
        begun_ms = self.started_at_ms + load_ms + queue_ms
        first_ms = self.ended_at_ms if self.first_token_at_ms is None else self.first_token_at_ms
        yield "prefill", max(0, first_ms - begun_ms)
        yield "decode", self.ended_at_ms - first_ms


@dataclass(frozen=True, slots=True)
class LogPage:
    """A page of requests.   older: place of the next page, None if this is the last one."""

    requests: list[LoggedRequest]
    older: tuple[int, int] | None


def read_page(
    conn: Connection,
    tenant_id: str,
    asked: Asked,
    limit: int,
    before: tuple[int, int] | None = None,
) -> LogPage:
    """Read the newest requests that meet the conditions.

    before: (at_ms, receipt_seq) of the last entry that was looked at; only older ones are read.
    """
    query = _select(tenant_id).where(entries.c.at_ms >= asked.start_ms)
    query = query.where(entries.c.at_ms < asked.end_ms)
    if before is not None:
        at_ms, seq = before
        query = query.where(entries.c.at_ms <= at_ms)
        query = query.where((entries.c.at_ms < at_ms) | (entries.c.receipt_seq < seq))
    query = query.order_by(entries.c.at_ms.desc(), entries.c.receipt_seq.desc())
    found: list[LoggedRequest] = []
    rows = conn.execute(query.limit(MAX_LOOKED_AT + 1)).mappings()
    last: tuple[int, int] | None = None
    for number, row in enumerate(rows):
        if len(found) == limit or number == MAX_LOOKED_AT:
            return LogPage(found, last)
        last = row["at_ms"], row["receipt_seq"]
        if row["request_id"] is not None and asked.is_met(row):
            found.append(_request(row))
    return LogPage(found, None)


def find_request(conn: Connection, tenant_id: str, request_id: str) -> LoggedRequest | None:
    """The tenant's request of an id, None if the ledger has none."""
    query = _select(tenant_id).where(usage_events.c.request_id == request_id)
    row = conn.execute(query).mappings().first()
    return None if row is None else _request(row)


Span = Literal["first_token", "whole"]


def read_slowest(conn: Connection, span: Span, limit: int) -> list[LoggedRequest]:
    """Read the slowest of the newest MAX_COMPARED requests, the slowest first, without proofs.

    span: the time that counts, to the first token or to the end.
    """
    query, newest = _newest(MAX_COMPARED)
    end = newest.c.ended_at_ms if span == "whole" else newest.c.first_token_at_ms
    slowest = query.where(end.is_not(None)).order_by(
        (end - newest.c.started_at_ms).desc(), newest.c.event_id.desc()
    )
    return [_request(row) for row in conn.execute(slowest.limit(limit)).mappings()]


def read_newest(conn: Connection, limit: int, since_ms: int) -> list[LoggedRequest]:
    """Read those of the newest `limit` requests that ended at since_ms or later, without proofs."""
    query, newest = _newest(limit)
    rows = conn.execute(query.where(newest.c.ended_at_ms >= since_ms)).mappings()
    return [_request(row) for row in rows]


def _newest(number: int) -> tuple[sa.Select[Any], sa.Subquery]:
    """The newest requests of all tenants in no order, and their events."""
    event = usage_events.c
    query = sa.select(event.event_id, *(event[name] for name in _COLUMNS))
    query = query.order_by(event.event_id.desc())
    newest = query.limit(number).subquery()
    found = sa.select(newest, entries.c.receipt_seq, entries.c.amount_nanousd)
    found = found.join(entries, entries.c.entry_id == newest.c.event_id)
    return found.where(is_tenants(newest.c.tenant_id)), newest


def outcome_of(row: RowMapping) -> Outcome:
    if row["is_failed"] or row["finish_reason"] == "error":
        return "failed"
    return "aborted" if row["finish_reason"] == "abort" else "served"


_COLUMNS = (
    "request_id", "tenant_id", "engine_id", "key_id", "model", "adapter_version", "adapter_digest",
    "finish_reason", "stop_cause", "is_failed", "prompt_tokens", "cached_tokens",
    "completion_tokens", "load_tier", "load_ms", "queue_ms", "started_at_ms", "first_token_at_ms",
    "ended_at_ms",
)  # fmt: skip
_COMPUTED = ("outcome", "model")


def _select(tenant_id: str) -> sa.Select[Any]:
    columns = [usage_events.c[name] for name in _COLUMNS]
    query = sa.select(
        entries.c.at_ms, entries.c.receipt_seq, entries.c.amount_nanousd, *columns
    ).select_from(entries.outerjoin(usage_events, usage_events.c.event_id == entries.c.entry_id))
    return query.where(entries.c.tenant_id == tenant_id)


def _request(row: RowMapping) -> LoggedRequest:
    names = (name for name in LoggedRequest.__slots__ if name not in _COMPUTED)
    return LoggedRequest(
        outcome=outcome_of(row), model=row["model"] or "", **{name: row[name] for name in names}
    )
