"""A tenant's usage, as sums."""

from typing import Annotated, Literal

from fastapi import Query
from pydantic import ConfigDict, Field
from sqlalchemy.engine import Connection

from server.api.answer import Answer
from server.api.deps import DatabaseDep, UsageKey, tenants_router
from server.api.times import Time, parse_range
from server.billing.rating import format_usd
from server.billing.receipts.receipt import SPEND_KINDS, EntryKind
from server.billing.usage import Selection, UsageSum, sum_entries
from server.database.database import Database
from server.text.json_object import JsonObject
from server.text.times import day_of

router = tenants_router()

Dimension = Literal["tenant", "model", "key", "adapter_digest", "kind", "day"]
_BOOKED = ("credit", "payment", "reversal")
GroupBy = Annotated[list[Dimension] | None, Query(max_length=16)]


class UsageLine(Answer):
    """A sum of usage, and what was spent: charges, less corrections of them.

    num_failed_requests: requests that an engine had, and whose error says that nothing was billed;
    num_requests leaves them out.   tenant, model, key, adapter_digest, kind, day: left out unless
    `group_by` names them.   tenant, key: ids.   kind: of ledger entry.   day: of UTC.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    tenant: str | None = Field(None, examples=["ten_5f0c1d2e3a4b5968"])
    model: str | None = Field(None, examples=["acme/support"])
    key: str | None = Field(None, examples=["8sKq2WvB4xLn"])
    adapter_digest: str | None = Field(None, examples=["3c" * 32])
    kind: EntryKind | None = Field(None, examples=["usage"])
    day: str | None = Field(None, examples=["2026-11-02"])
    num_requests: int = Field(examples=[1240])
    num_failed_requests: int = Field(examples=[2])
    prompt_tokens: int = Field(examples=[512_400])
    cached_tokens: int = Field(examples=[204_800])
    completion_tokens: int = Field(examples=[96_210])
    amount_nanousd: int = Field(examples=[119_226_000])
    amount_usd: str = Field(examples=["0.119226000"])


class UsageList(Answer):
    """Sums of usage from start_time until before end_time, in Unix seconds.

    bookings: credits, payments and their reversals in this time, which are in none of the sums.
    """

    # Routes leave out what is not set, so the constants have no defaults.
    object: Literal["list"]
    start_time: int = Field(examples=[1_793_491_200])
    end_time: int = Field(examples=[1_796_083_200])
    data: list[UsageLine]
    bookings: list[UsageLine]
    has_more: Literal[False]


@router.get("/usage", response_model_exclude_unset=True)
async def get_usage(
    database: DatabaseDep,
    identity: UsageKey,
    start: Time = None,
    end: Time = None,
    group_by: GroupBy = None,
) -> UsageList:
    """Sum up the tenant's usage, by the dimensions that `group_by` names."""
    return await usage_list(database, identity.tenant_id, start, end, group_by or [])


async def usage_list(
    database: Database,
    tenant_id: str | None,
    start: str | None,
    end: str | None,
    group_by: list[Dimension],
) -> UsageList:
    """The usage of a tenant as sums; tenant_id None is all tenants."""
    start_ms, end_ms = parse_range(start, end)
    tenant_ids = None if tenant_id is None else [tenant_id]

    def read(conn: Connection) -> tuple[list[UsageSum], list[UsageSum]]:
        spend, booked = (Selection(tenant_ids=tenant_ids, kinds=k) for k in (SPEND_KINDS, _BOOKED))
        return (
            sum_entries(conn, start_ms, end_ms, group_by, spend),
            sum_entries(conn, start_ms, end_ms, ["kind"], booked),
        )

    sums, bookings = await database.read(read)
    return UsageList(
        object="list",
        start_time=start_ms // 1000,
        end_time=end_ms // 1000,
        data=[_line(total, group_by) for total in sums],
        bookings=[_line(total, ["kind"]) for total in bookings],
        has_more=False,
    )


def _line(total: UsageSum, group_by: list[Dimension]) -> UsageLine:
    groups: JsonObject = {}
    for name in group_by:
        groups[name] = day_of(total.at_ms) if name == "day" else getattr(total, name)
    return UsageLine(
        **groups,
        num_requests=total.num_requests,
        num_failed_requests=total.num_failed_requests,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        completion_tokens=total.completion_tokens,
        amount_nanousd=total.amount_nanousd,
        amount_usd=format_usd(total.amount_nanousd),
    )
