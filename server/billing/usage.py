"""Usage for tenants and operators: sums over the ledger's entries, for any range of time.

Whole hours are read from the roll-ups, and whole days from sums by day where these have what is
asked for; both are updated when entries are posted. The parts of hours at the beginning and end of
a range are read from the entries themselves. Ranges [start, end) are in Unix milliseconds, and
select entries by their `at_ms`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from registry.errors import Invalid
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.receipts.rows import SIGNED_AMOUNT, is_tenants
from server.billing.tables import (
    USAGE_SUMS,
    entries,
    kept_events,
    price_versions,
    tenant_accounts,
    usage_days,
    usage_events,
    usage_rollups,
)
from server.text.json_object import JsonObject
from server.text.times import DAY_MS, HOUR_MS

Dimension = Literal["tenant", "model", "key", "adapter_digest", "kind", "day", "hour", "minute"]
MAX_GROUPS = 10_000

WIDTH_MS = {"minute": 60_000, "hour": HOUR_MS, "day": DAY_MS}

_MAX_MS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A selection of entries; None selects all, but no proofs.

    models: model names in requests; the name of an adapter includes its aliases and versions.
    names: exactly these model names, which takes a fraction of the time.
    """

    tenant_ids: Collection[str] | None = None
    key_ids: Collection[str] | None = None
    models: Collection[str] | None = None
    names: Collection[str] | None = None
    kinds: Collection[str] | None = None


EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """Usage of one group, and the amounts of its entries.

    A dimension that is not grouped by is None. at_ms: beginning of the group's day, hour or minute.
    num_failed_requests: requests whose error says that nothing was billed; num_requests leaves them
    out.
    kept_mb_s: 10^6 bytes for a second.   cached_, completion_amount: parts of the amount.
    """

    num_requests: int = 0
    num_failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    kept_mb_s: int = 0
    cached_amount_nanousd: int = 0
    completion_amount_nanousd: int = 0
    amount_nanousd: int = 0
    tenant: str | None = None
    model: str | None = None
    key: str | None = None
    adapter_digest: str | None = None
    kind: str | None = None
    at_ms: int | None = None


def sum_entries(
    conn: Connection,
    start_ms: int,
    end_ms: int,
    group_by: Iterable[Dimension] = (),
    only: Selection = EVERYTHING,
    largest: int | None = None,
) -> list[UsageSum]:
    """Return one row per group, ordered by its dimensions; without dimensions, one row in all.

    group_by: may contain at most one of day, hour and minute.   largest: how many groups to return,
    those of the largest amounts, the largest first. Without it, Invalid is raised when there are
    more than MAX_GROUPS groups, since a list that is cut off would not add up.
    """
    group_by = tuple(dict.fromkeys(group_by))
    # The caller's numbers may be too large for any column.
    start_ms, end_ms = (min(max(ms, 0), _MAX_MS) for ms in (start_ms, end_ms))
    parts = _cut(start_ms, end_ms, _sources(group_by, only))
    # A single query reads all parts as of the same moment.
    rows = sa.union_all(*(read(span, group_by, only) for read, span in parts)).subquery()
    sums = [sa.func.coalesce(sa.func.sum(rows.c[name]), 0).label(name) for name in USAGE_SUMS]
    dimensions = [rows.c[name] for name in group_by]
    query = sa.select(*dimensions, *sums).group_by(*dimensions)
    if largest is not None:
        query = query.order_by(sums[-1].desc(), *dimensions).limit(largest)
        return [_usage_sum(row, group_by) for row in conn.execute(query).mappings()]
    found = conn.execute(query.limit(MAX_GROUPS + 1)).mappings().all()
    if len(found) > MAX_GROUPS:
        raise Invalid(
            f"There are more than {MAX_GROUPS} groups; ask for a shorter time or fewer dimensions.",
            param="group_by",
        )
    # Sorted here and not in SQL, since databases disagree on the order of names.
    ordered = sorted(found, key=lambda row: tuple(row[name] for name in group_by))
    return [_usage_sum(row, group_by) for row in ordered]


Span = tuple[int, int]
Read = Callable[[Span, Sequence[Dimension], Selection], sa.Select[Any]]


def _sources(group_by: Sequence[Dimension], only: Selection) -> list[tuple[int, Read]]:
    """The sources of sums, each with the milliseconds of a part; the longest first."""
    sources: list[tuple[int, Read]] = [(1, entry_rows)]
    if "minute" not in group_by:
        sources.insert(0, (HOUR_MS, _rollup_rows))
        if "hour" not in group_by and _day_dimension(group_by, only) is not None:
            sources.insert(0, (DAY_MS, _day_rows))
    return sources


def _day_dimension(group_by: Sequence[Dimension], only: Selection) -> str | None:
    """The dimension whose sums by day answer a query; None if no single one does."""
    asked = set(group_by) - {"tenant", "day"}
    asked |= {"model"} if (only.models, only.names) != (None, None) else set()
    asked |= {"key"} if only.key_ids is not None else set()
    if asked <= {"kind"}:
        return "kind"
    are_costs = only.kinds is not None and set(only.kinds) == set(SPEND_KINDS)
    return asked.pop() if are_costs and asked in ({"model"}, {"key"}) else None


def _cut(
    start_ms: int, end_ms: int, sources: Sequence[tuple[int, Read]]
) -> Iterator[tuple[Read, Span]]:
    """Divide a range of time, and yield who answers for each part.

    [start, first)  finer sources      [first, last)  first source      [last, end)  finer sources
    """
    (width_ms, read), *finer = sources
    first = -(-start_ms // width_ms) * width_ms
    last = end_ms // width_ms * width_ms
    if first >= last and finer:
        yield from _cut(start_ms, end_ms, finer)
        return
    yield read, (first, last)
    for start, end in ((start_ms, first), (last, end_ms)):
        if start < end:
            yield from _cut(start, end, finer)


def _day_rows(span: Span, group_by: Sequence[Dimension], only: Selection) -> sa.Select[Any]:
    days, dimension = usage_days.c, _day_dimension(group_by, only)
    assert dimension is not None
    dimensions = {"tenant": days.tenant_id, dimension: days.name}
    # The sums by model and key have no kind: they are of all kinds that are asked for.
    named = only if dimension == "kind" else replace(only, kinds=None)
    query = _select(dimensions, days.day_ms, days, span, group_by, named)
    return query.where(days.tenant_id.in_(_tenant_ids(only)), days.dimension == dimension)


def _rollup_rows(span: Span, group_by: Sequence[Dimension], only: Selection) -> sa.Select[Any]:
    sums, chosen = usage_rollups.c, only.tenant_ids
    dimensions = {
        "tenant": sums.tenant_id,
        "model": sums.model,
        "key": sums.key_id,
        "adapter_digest": sums.adapter_digest,
        "kind": sums.kind,
    }
    query = _select(dimensions, sums.hour_ms, sums, span, group_by, only)
    tenant_id = sums.tenant_id
    return query.where(is_tenants(tenant_id) if chosen is None else tenant_id.in_(chosen))


def entry_rows(span: Span, group_by: Sequence[Dimension], only: Selection) -> sa.Select[Any]:
    """Select a row for each entry, with its dimensions and what it adds to the sums."""
    entry, usage, kept, price = entries.c, usage_events.c, kept_events.c, price_versions.c
    digest = sa.func.coalesce(usage.adapter_digest, kept.adapter_digest, "")
    dimensions = {
        "tenant": entry.tenant_id,
        "model": sa.func.coalesce(usage.model, ""),
        "key": sa.func.coalesce(usage.key_id, ""),
        "adapter_digest": digest,
        "kind": entry.kind,
    }
    # A free entry has no parts, whatever its tokens would cost otherwise.
    is_paid = entry.amount_nanousd > 0
    values: JsonObject = {
        "num_requests": sa.case((usage.is_failed.is_(False), 1), else_=0),
        "num_failed_requests": sa.case((usage.is_failed.is_(True), 1), else_=0),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "kept_mb_s": _mb_s(kept.size_bytes, kept.duration_ms),
        "cached_amount_nanousd": sa.case((is_paid, usage.cached_tokens * price.cached_nanousd)),
        "completion_amount_nanousd": sa.case(
            (is_paid, usage.completion_tokens * price.completion_nanousd)
        ),
        "amount_nanousd": SIGNED_AMOUNT,
    }
    joined = entries.outerjoin(usage_events, usage.event_id == entry.entry_id)
    joined = joined.outerjoin(kept_events, kept.event_id == entry.entry_id)
    joined = joined.outerjoin(price_versions, price.price_version == entry.price_version)
    query = _select(dimensions, entry.at_ms, values, span, group_by, only).select_from(joined)
    return query.where(entry.tenant_id.in_(_tenant_ids(only)))


def _tenant_ids(only: Selection) -> Any:
    """Tenants whose rows are read where no index is by time alone: all that have entries."""
    account, chosen = tenant_accounts.c.tenant_id, only.tenant_ids
    return sa.select(account).where(is_tenants(account)) if chosen is None else chosen


def _mb_s(size_bytes: sa.ColumnElement[int], duration_ms: sa.ColumnElement[int]) -> Any:
    """Megabyte-seconds of an entry, rounded down like `entries.rollup_values`, without overflow."""
    whole, rest = size_bytes // 10**9, size_bytes % 10**9
    return whole * duration_ms + rest * duration_ms // 10**9


def _select(
    dimensions: JsonObject,
    at_ms: Any,
    values: Any,
    span: Span,
    group_by: Sequence[Dimension],
    only: Selection,
) -> sa.Select[Any]:
    """Select rows of a span of time that are not summed yet, with the dimensions in `group_by`.

    values: the columns of the sums, by name.
    """
    columns = []
    for name in group_by:
        width_ms = WIDTH_MS.get(name)
        column = dimensions[name] if width_ms is None else at_ms - at_ms % width_ms
        columns.append(column.label(name))
    query = sa.select(*columns, *(values[name].label(name) for name in USAGE_SUMS))
    query = query.where(at_ms >= span[0], at_ms < span[1])
    for name, chosen in (("kind", only.kinds), ("key", only.key_ids), ("model", only.names)):
        if chosen is not None:
            query = query.where(dimensions[name].in_(chosen))
    if only.models is not None:
        model = dimensions["model"]
        versions = [sa.func.substr(model, 1, len(name) + 1) == f"{name}@" for name in only.models]
        query = query.where(sa.or_(model.in_(only.models), *versions))
    return query


def _usage_sum(row: RowMapping, group_by: Sequence[Dimension]) -> UsageSum:
    # PostgreSQL sums integers as decimals.
    values: JsonObject = {name: int(row[name]) for name in USAGE_SUMS}
    for name in group_by:
        if name in WIDTH_MS:
            values["at_ms"] = int(row[name])
        else:
            values[name] = row[name] or None
    return UsageSum(**values)
