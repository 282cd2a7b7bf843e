"""A tenant's usage, as sums."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from server.api import errors
from server.api.deps import DatabaseDep, UsageKey
from server.billing.rating import format_usd
from server.billing.usage import EVERYTHING, UsageSum, Which, sum_entries
from server.database.clock import now_ms
from server.database.database import Database
from server.text.json_object import JsonObject

router = APIRouter()

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Dimension = Literal["tenant", "model", "key", "adapter_digest", "kind", "day"]
GroupBy = Annotated[list[Dimension] | None, Query(max_length=16)]
# As parse_range reads it: a date, a time or Unix seconds.
Time = Annotated[str | None, Query(max_length=64)]


@router.get("/usage")
async def get_usage(
    database: DatabaseDep,
    identity: UsageKey,
    start: Time = None,
    end: Time = None,
    group_by: GroupBy = None,
) -> JsonObject:
    """Sum up the tenant's usage, by the dimensions that `group_by` names."""
    return await render_usage(database, identity.tenant_id, start, end, group_by or [])


async def render_usage(
    database: Database,
    tenant_id: str | None,
    start: str | None,
    end: str | None,
    group_by: list[Dimension],
) -> JsonObject:
    """The usage of a tenant as sums; tenant_id None is all tenants."""
    start_ms, end_ms = parse_range(start, end)
    which = EVERYTHING if tenant_id is None else Which(tenant_ids=[tenant_id])
    sums = await database.read(lambda conn: sum_entries(conn, start_ms, end_ms, group_by, which))
    return {
        "object": "list",
        "start_time": start_ms // 1000,
        "end_time": end_ms // 1000,
        "data": [_render_sum(total, group_by) for total in sums],
        "has_more": False,
    }


def _render_sum(total: UsageSum, group_by: list[Dimension]) -> JsonObject:
    groups: JsonObject = {}
    for name in group_by:
        groups[name] = _date(total.at_ms) if name == "day" else getattr(total, name)
    return groups | {
        "num_requests": total.num_requests,
        "num_failed_requests": total.num_failed_requests,
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "completion_tokens": total.completion_tokens,
        "amount_nanousd": total.amount_nanousd,
        "amount_usd": format_usd(total.amount_nanousd),
    }


def _date(at_ms: int | None) -> str:
    """A date of UTC, like `2026-03-02`."""
    assert at_ms is not None
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d}"


def parse_range(start: str | None, end: str | None) -> tuple[int, int]:
    """[start, end) in Unix milliseconds; by default from the start of this month until now."""
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    start_ms = int(month.timestamp() * 1000) if start is None else _parse_time("start", start)
    return start_ms, now_ms() + 1 if end is None else _parse_time("end", end)


def _parse_time(name: str, text: str) -> int:
    """Unix milliseconds of a time that is given as Unix seconds, a date, or a date and time; UTC
    where no zone is given.
    """
    try:
        if text.lstrip("-").isdigit():
            return int(text) * 1000
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
        # timestamp() is a float of seconds, which may be a millisecond low.
        return (moment - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        raise errors.invalid_request(
            f"{name} must be Unix seconds or an ISO 8601 date, not {text[:40]!r}.", param=name
        ) from None
