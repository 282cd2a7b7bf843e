"""Results of OpenAI's usage and costs of an organization, as this server fills them in.

A project is a tenant. What is not served is 0 or null.
"""

from collections.abc import Iterable
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from server.api.answer import Answer
from server.billing.rating import format_usd
from server.billing.usage import UsageSum
from server.billing.usage_buckets import Cost, LineItem
from server.text.json_object import JsonObject

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


def completions_result(total: UsageSum, group_by: Iterable[str]) -> CompletionsResult:
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


def costs_result(total: UsageSum, parts: list[Cost], group_by: Iterable[str]) -> CostsResult:
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
