"""OpenAI's usage and costs of an organization: a project is a tenant.

A tenant's key reads its own project; the operator's admin key reads any. Fields of features that
are not served are 0 or null, as OpenAI has them for models without such features.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from registry.errors import Invalid
from server.api.answer import Answer
from server.api.deps import DatabaseDep, UsageReader, usage_reader
from server.api.times import UnixSeconds, check_order
from server.billing.rating import format_usd
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import Dimension, Selection, UsageSum, sum_entries
from server.billing.usage_buckets import (
    UNIT,
    WIDTH_S,
    Cost,
    LineItem,
    Page,
    Width,
    costs_of,
    cut_page,
)
from server.database.clock import now_ms
from server.database.database import Database
from server.text.json_object import JsonObject

# Buckets of a page: the default, and the most.
LIMITS: dict[Width, tuple[int, int]] = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COSTS_LIMITS = (7, 180)

_MAX_NAMES = 100
_DIMENSIONS: dict[str, Dimension] = {"project_id": "tenant", "api_key_id": "key", "model": "model"}

Names = Annotated[
    list[Annotated[str, StringConstraints(max_length=256)]], Field(max_length=_MAX_NAMES)
]
Time = Annotated[UnixSeconds, Field(ge=0)]


class _Query(BaseModel):
    # Unknown parameters are refused, never ignored.
    model_config = ConfigDict(extra="forbid")

    start_time: Time
    end_time: Time | None = None
    project_ids: Names | None = None
    api_key_ids: Names | None = None
    limit: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    page: Annotated[str, Field(max_length=64)] | None = None


class CompletionsQuery(_Query):
    bucket_width: Width = "1d"
    user_ids: Names | None = None
    models: Names | None = None
    batch: bool | None = None
    group_by: list[
        Literal[
            "project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"
        ]
    ] = Field([], max_length=16)


class CostsQuery(_Query):
    bucket_width: Literal["1d"] = "1d"
    line_items: Names | None = None
    group_by: list[Literal["project_id", "user_id", "line_item", "api_key_id", "api_source"]] = (
        Field([], max_length=16)
    )


# Dimensions with one value here: grouping by them makes one group.
_ONE_VALUE = {"user_id": None, "batch": False, "service_tier": None, "api_source": "unlabeled"}

Unserved = Literal[0]
_Project = Annotated[str | None, Field(examples=["ten_5f0c1d2e3a4b5968"])]
_ApiKey = Annotated[str | None, Field(examples=["8sKq2WvB4xLn"])]
_ApiSource = Literal["unlabeled"] | None


class CompletionsResult(Answer):
    """Token usage of one group. A dimension that results are not grouped by is null."""

    object: Literal["organization.usage.completions.result"] = (
        "organization.usage.completions.result"
    )
    input_tokens: int = Field(examples=[512_400])
    input_cached_tokens: int = Field(examples=[204_800])
    input_uncached_tokens: int = Field(examples=[307_600])
    input_cache_write_tokens: Unserved = 0
    input_cache_write_30m_tokens: Unserved = 0
    input_cache_write_12h_tokens: Unserved = 0
    input_text_tokens: int = Field(examples=[307_600])
    input_cached_text_tokens: int = Field(examples=[204_800])
    input_audio_tokens: Unserved = 0
    input_cached_audio_tokens: Unserved = 0
    input_image_tokens: Unserved = 0
    input_cached_image_tokens: Unserved = 0
    output_tokens: int = Field(examples=[96_210])
    output_text_tokens: int = Field(examples=[96_210])
    output_audio_tokens: Unserved = 0
    output_image_tokens: Unserved = 0
    num_model_requests: int = Field(examples=[1240])
    project_id: _Project
    api_key_id: _ApiKey
    model: str | None = Field(examples=["acme/support"])
    user_id: None
    batch: Literal[False] | None
    service_tier: None
    api_source: _ApiSource


class CostAmount(Answer):
    """An amount of dollars, rounded to a float."""

    value: float = Field(examples=[0.119226])
    currency: Literal["usd"] = "usd"


class CostsResult(Answer):
    """Costs of one group. A dimension that results are not grouped by is null.

    amount_usd, amount_nanousd: the exact amount, in dollars and nano-dollars.
    quantity: what was used of the line item, in quantity_unit.
    """

    object: Literal["organization.costs.result"] = "organization.costs.result"
    amount: CostAmount
    amount_usd: str = Field(examples=["0.119226000"])
    amount_nanousd: int = Field(examples=[119_226_000])
    line_item: LineItem | None
    quantity: int | float | None = Field(examples=[307_600])
    quantity_unit: str | None = Field(examples=["tokens"])
    project_id: _Project
    api_key_id: _ApiKey
    user_id: None
    api_source: _ApiSource


Result = TypeVar("Result")
Bucket = TypeVar("Bucket")


class _Bucket(Answer, Generic[Result]):
    """A time from start_time until before end_time, in Unix seconds."""

    object: Literal["bucket"] = "bucket"
    start_time: int = Field(examples=[1_796_083_200])
    end_time: int = Field(examples=[1_796_169_600])
    results: list[Result]


class _BucketPage(Answer, Generic[Bucket]):
    """A page of buckets, oldest first."""

    object: Literal["page"] = "page"
    data: list[Bucket]
    has_more: bool
    next_page: str | None = Field(examples=["page_AAAAAGsPKQAAAAAAaw96gA=="])


class CompletionsBucket(_Bucket[CompletionsResult]):
    """Token usage of a time, from start_time until before end_time in Unix seconds."""


class CompletionsUsage(_BucketPage[CompletionsBucket]):
    """A page of token usage.   next_page: the `page` to ask for next; null on the last."""


class CostsBucket(_Bucket[CostsResult]):
    """Costs of a time, from start_time until before end_time in Unix seconds."""


class Costs(_BucketPage[CostsBucket]):
    """A page of costs.   next_page: the `page` to ask for next; null on the last."""


class _BracketsRoute(APIRoute):
    """Reads `models[]=a` as `models=a`: OpenAI's clients send lists both ways."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_without_brackets(request: Request) -> Response:
            given = parse_qsl(request.scope["query_string"].decode("latin-1"), True)
            renamed = urlencode([(name.removesuffix("[]"), value) for name, value in given])
            request.scope["query_string"] = renamed.encode()
            response: Response = await handle(Request(request.scope, request.receive))
            return response

        return handle_without_brackets


# For tenants and the operator: the key decides whose usage is read.
router = APIRouter(
    prefix="/v1/organization",
    dependencies=[Depends(usage_reader)],
    route_class=_BracketsRoute,
)


@router.get("/usage/completions")
async def usage_completions(
    database: DatabaseDep, reader: UsageReader, query: Annotated[CompletionsQuery, Query()]
) -> CompletionsUsage:
    """Get token usage in buckets of time, in the shape of OpenAI's usage of completions."""
    page = _page(query, *LIMITS[query.bucket_width])
    sums: list[UsageSum] = []
    # No usage belongs to a user or a batch.
    if query.user_ids is None and not query.batch:
        groups = [_DIMENSIONS[name] for name in query.group_by if name in _DIMENSIONS]
        only = Selection(
            tenant_ids=_projects(reader, query),
            key_ids=query.api_key_ids,
            models=query.models,
            kinds=("usage",),
        )
        sums = await _sum(database, page, query.bucket_width, groups, only)
    results = [(total, _completions_result(total, query.group_by)) for total in sums]
    return CompletionsUsage(**_render(page, query.bucket_width, results))


@router.get("/costs")
async def costs(
    database: DatabaseDep, reader: UsageReader, query: Annotated[CostsQuery, Query()]
) -> Costs:
    """Get costs in buckets of a day, in the shape of OpenAI's costs."""
    page = _page(query, *COSTS_LIMITS)
    groups = [_DIMENSIONS[name] for name in query.group_by if name in _DIMENSIONS]
    only = Selection(
        tenant_ids=_projects(reader, query), key_ids=query.api_key_ids, kinds=SPEND_KINDS
    )
    sums = await _sum(database, page, query.bucket_width, [*groups, "kind"], only)
    results: list[tuple[UsageSum, CostsResult]] = []
    for group in _by_group(sums):
        found = [cost for total in group for cost in costs_of(total)]
        if query.line_items is not None:
            found = [cost for cost in found if cost.line_item in query.line_items]
        if "line_item" in query.group_by:
            results += [(group[0], _costs_result(group[0], [c], query.group_by)) for c in found]
        elif found:
            results.append((group[0], _costs_result(group[0], found, query.group_by)))
    return Costs(**_render(page, query.bucket_width, results))


def _page(query: CompletionsQuery | CostsQuery, default: int, most: int) -> Page:
    limit = default if query.limit is None else query.limit
    if not 1 <= limit <= most:
        raise Invalid(
            f"limit must be from 1 to {most} where bucket_width is {query.bucket_width}.",
            param="limit",
        )
    end = now_ms() // 1000 + 1 if query.end_time is None else query.end_time
    check_order(query.start_time, end, ("start_time", "end_time"))
    return cut_page(query.bucket_width, query.start_time, end, limit, query.page)


def _projects(reader: str | None, query: _Query) -> Collection[str] | None:
    """The tenants to read; None for all. Another tenant's project counts as not there."""
    if reader is None:
        return query.project_ids
    return [reader] if query.project_ids is None or reader in query.project_ids else []


async def _sum(
    database: Database, page: Page, width: Width, groups: list[Dimension], only: Selection
) -> list[UsageSum]:
    by = (UNIT[width], *groups)
    return await database.read(lambda conn: sum_entries(conn, page.start_ms, page.end_ms, by, only))


def _by_group(sums: list[UsageSum]) -> Iterable[list[UsageSum]]:
    """Groups of sums that differ in nothing but their kind."""
    groups: dict[tuple[object, ...], list[UsageSum]] = defaultdict(list)
    for total in sums:
        groups[total.at_ms, total.tenant, total.key].append(total)
    return groups.values()


def _render(page: Page, width: Width, results: Iterable[tuple[UsageSum, Answer]]) -> JsonObject:
    """A page's fields. results: in order, beside the sums that say in which bucket they are."""
    by_start: dict[int, list[Answer]] = defaultdict(list)
    for total, result in results:
        assert total.at_ms is not None
        by_start[total.at_ms // 1000].append(result)
    data = [
        {
            "start_time": start,
            "end_time": end,
            "results": by_start[start - start % WIDTH_S[width]],
        }
        for start, end in page.buckets
    ]
    has_more = page.next_page is not None
    return {"data": data, "has_more": has_more, "next_page": page.next_page}


def _completions_result(total: UsageSum, group_by: Iterable[str]) -> CompletionsResult:
    uncached = total.prompt_tokens - total.cached_tokens
    return CompletionsResult(
        input_tokens=total.prompt_tokens,
        input_cached_tokens=total.cached_tokens,
        input_uncached_tokens=uncached,
        input_text_tokens=uncached,
        input_cached_text_tokens=total.cached_tokens,
        output_tokens=total.completion_tokens,
        output_text_tokens=total.completion_tokens,
        num_model_requests=total.num_requests,
        project_id=total.tenant,
        api_key_id=total.key,
        model=total.model,
        **_ones("user_id", "batch", "service_tier", "api_source", group_by=group_by),
    )


def _costs_result(total: UsageSum, parts: list[Cost], group_by: Iterable[str]) -> CostsResult:
    """A result. parts: the costs that it adds up; one, where line items are told apart."""
    amount_nanousd = sum(cost.amount_nanousd for cost in parts)
    item = parts[0] if "line_item" in group_by else None
    return CostsResult(
        # OpenAI's amount is a float; the exact amount is beside it.
        amount=CostAmount(value=amount_nanousd / 10**9),
        amount_usd=format_usd(amount_nanousd),
        amount_nanousd=amount_nanousd,
        line_item=item.line_item if item else None,
        quantity=item.quantity if item else None,
        quantity_unit=item.unit if item else None,
        project_id=total.tenant,
        api_key_id=total.key,
        **_ones("user_id", "api_source", group_by=group_by),
    )


def _ones(*names: str, group_by: Iterable[str]) -> JsonObject:
    """The dimensions that have one value: that value if results are grouped by them, else null."""
    return {name: _ONE_VALUE[name] if name in group_by else None for name in names}
