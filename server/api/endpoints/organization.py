"""OpenAI's usage and costs of an organization: a project is a tenant.

A tenant's key reads its own project; the operator's admin key reads any. Fields of features that
are not served are 0 or null, as OpenAI has them for models without such features.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from registry.errors import Invalid
from server.api.answer import Answer
from server.api.deps import DatabaseDep, UsageReader, usage_reader
from server.api.organization_results import (
    CompletionsUsage,
    Costs,
    CostsResult,
    completions_result,
    costs_result,
)
from server.api.times import UnixSeconds, check_order
from server.billing.receipts.receipt import SPEND_KINDS
from server.billing.usage import Dimension, Selection, UsageSum, sum_entries
from server.billing.usage_buckets import (
    UNIT,
    WIDTH_S,
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
    results = [(total, completions_result(total, query.group_by)) for total in sums]
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
            results += [(group[0], costs_result(group[0], [c], query.group_by)) for c in found]
        elif found:
            results.append((group[0], costs_result(group[0], found, query.group_by)))
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
