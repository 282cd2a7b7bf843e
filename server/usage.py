"""Usage as tenants and operators ask for it: sums, and the events behind them, from the ledger.

Times are Unix milliseconds, [start, end) of when a request ended. tenant_id None is every tenant,
for the operator only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.errors import invalid_request
from server.ledger_tables import usage_events

Dimension = Literal["tenant", "model", "key", "adapter_digest", "day"]
MAX_GROUPS = 10_000

_DAY_MS = 86_400_000
_MAX_MS = 2**62

_events = usage_events.c
_COLUMNS: dict[Dimension, sa.ColumnElement[Any]] = {
    "tenant": _events.tenant_id,
    "model": _events.model,
    "key": _events.key_id,
    "adapter_digest": _events.adapter_digest,
    "day": _events.ended_at_ms - _events.ended_at_ms % sa.literal_column(str(_DAY_MS)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """What one group used. A dimension that is not grouped by is None; day is `2026-03-02`, UTC."""

    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_nanousd: int
    tenant: str | None = None
    model: str | None = None
    key: str | None = None
    adapter_digest: str | None = None
    day: str | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last event of a page: the next one begins after it."""

    ended_at_ms: int
    event_id: int


def summarize(
    conn: Connection,
    tenant_id: str | None,
    start_ms: int,
    end_ms: int,
    group_by: Sequence[Dimension] = (),
) -> list[UsageSum]:
    """One row per group, in the order of its dimensions; without any, one row in all.

    Raises ApiError when there are more than MAX_GROUPS: a sum that is cut off is no sum.
    """
    group_by = tuple(dict.fromkeys(group_by))
    columns = [_COLUMNS[dimension].label(dimension) for dimension in group_by]
    sums = [
        sa.func.count().label("num_requests"),
        *(
            sa.func.coalesce(sa.func.sum(_events[name]), 0).label(name)
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "amount_nanousd")
        ),
    ]
    query = _in_range(sa.select(*columns, *sums), tenant_id, start_ms, end_ms)
    if columns:
        # What has no key or adapter comes first, on both databases.
        order = [column.nulls_first() for column in columns]
        query = query.group_by(*columns).order_by(*order).limit(MAX_GROUPS + 1)
    rows = conn.execute(query).mappings().all()
    if len(rows) > MAX_GROUPS:
        raise invalid_request(
            f"There are more than {MAX_GROUPS} groups; ask for a shorter period.", param="group_by"
        )
    return [_usage_sum(row, group_by) for row in rows]


def newest_event_id(conn: Connection) -> int:
    """What has been posted by now: a bound that keeps the pages of one export together."""
    return conn.scalar(sa.select(sa.func.max(_events.event_id))) or 0


def page_events(
    conn: Connection,
    tenant_id: str | None,
    start_ms: int,
    end_ms: int,
    *,
    after: Cursor | None = None,
    through_event_id: int | None = None,
    limit: int = 1000,
) -> list[RowMapping]:
    """At most `limit` events, in the order they ended, by the names of `usage_events`."""
    query = _in_range(sa.select(usage_events), tenant_id, start_ms, end_ms)
    if after is not None:
        # Spelled out, not as a row value: the planners of both databases then use the index.
        query = query.where(
            _events.ended_at_ms >= after.ended_at_ms,
            sa.or_(_events.ended_at_ms > after.ended_at_ms, _events.event_id > after.event_id),
        )
    if through_event_id is not None:
        query = query.where(_events.event_id <= through_event_id)
    query = query.order_by(_events.ended_at_ms, _events.event_id).limit(limit)
    return list(conn.execute(query).mappings())


def cursor_of(event: RowMapping) -> Cursor:
    return Cursor(event["ended_at_ms"], event["event_id"])


def _in_range(
    query: sa.Select[Any], tenant_id: str | None, start_ms: int, end_ms: int
) -> sa.Select[Any]:
    # A caller's number may be larger than any column.
    start_ms, end_ms = (min(max(ms, 0), _MAX_MS) for ms in (start_ms, end_ms))
    query = query.where(_events.ended_at_ms >= start_ms, _events.ended_at_ms < end_ms)
    return query if tenant_id is None else query.where(_events.tenant_id == tenant_id)


def _usage_sum(row: RowMapping, group_by: Sequence[Dimension]) -> UsageSum:
    groups: dict[str, Any] = {dimension: row[dimension] for dimension in group_by}
    if "day" in groups:
        groups["day"] = f"{datetime.fromtimestamp(groups['day'] / 1000, UTC):%Y-%m-%d}"
    # PostgreSQL sums integers as decimals.
    return UsageSum(
        num_requests=row["num_requests"],
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        amount_nanousd=int(row["amount_nanousd"]),
        **groups,
    )
