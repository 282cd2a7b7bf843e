"""Usage and costs in buckets of time, divided and paged as in OpenAI's usage API.

Buckets begin at whole minutes, hours or days in UTC; the first and the last bucket of a query are
cut off at its start and end. Times are Unix seconds.
"""

import base64
import binascii
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from registry.errors import Invalid
from server.billing.usage import Dimension, UsageSum

Width = Literal["1m", "1h", "1d"]
LineItem = Literal[
    "prompt", "cached prompt", "completion", "adapter storage", "adapter pinning",
    "adapter residency", "correction",
]  # fmt: skip

WIDTH_S: dict[Width, int] = {"1m": 60, "1h": 3600, "1d": 86_400}
UNIT: dict[Width, Dimension] = {"1m": "minute", "1h": "hour", "1d": "day"}

ITEM_OF_KIND: dict[str, LineItem] = {
    "storage": "adapter storage",
    "pinned": "adapter pinning",
    "resident": "adapter residency",
    "correction": "correction",
}

_CURSOR = struct.Struct(">qq")
_PREFIX = "page_"
_MB_S_PER_GIB_HOUR = 2**30 / 10**6 * 3600


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a query.

    buckets: (start, end) of each, oldest first.   next_page: cursor of the next page, None if last.
    """

    buckets: tuple[tuple[int, int], ...]
    next_page: str | None

    @property
    def start_ms(self) -> int:
        return self.buckets[0][0] * 1000

    @property
    def end_ms(self) -> int:
        return self.buckets[-1][1] * 1000


def cut_page(width: Width, start: int, end: int, limit: int, cursor: str | None) -> Page:
    """Return the buckets of one page of [start, end).

    A cursor contains the beginning of its page and the end of the query, so new usage moves
    neither. Raises Invalid for a cursor of another query.
    """
    width_s = WIDTH_S[width]
    if cursor is not None:
        place, end = _decode(cursor)
        if place % width_s or not start < place < end:
            raise _invalid_page()
        start = place
    cuts = [start]
    while cuts[-1] < end and len(cuts) <= limit:
        cuts.append(min((cuts[-1] // width_s + 1) * width_s, end))
    buckets = tuple(zip(cuts[:-1], cuts[1:], strict=True))
    return Page(buckets, _encode(cuts[-1], end) if cuts[-1] < end else None)


def _encode(place: int, end: int) -> str:
    return _PREFIX + base64.urlsafe_b64encode(_CURSOR.pack(place, end)).decode()


def _decode(cursor: str) -> tuple[int, int]:
    try:
        packed = base64.b64decode(cursor.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        place, end = _CURSOR.unpack(packed)
    except (binascii.Error, struct.error, ValueError):
        raise _invalid_page() from None
    return place, end


def _invalid_page() -> Exception:
    return Invalid("page must be the next_page of an answer to the same query.", param="page")


@dataclass(frozen=True, slots=True)
class Cost:
    """A line of costs. quantity: priced amount in `unit`; both are None if there is no one unit."""

    line_item: LineItem
    amount_nanousd: int
    quantity: float | None = None
    unit: str | None = None


def costs_of(total: UsageSum) -> Iterator[Cost]:
    """Divide the sum of one kind into its lines, leaving out those without quantity and amount."""
    assert total.kind is not None
    if total.kind == "usage":
        items = _token_costs(total)
    else:
        items = [_kept_cost(ITEM_OF_KIND[total.kind], total)]
    return (cost for cost in items if cost.amount_nanousd or cost.quantity)


def _token_costs(total: UsageSum) -> Sequence[Cost]:
    prompt_nanousd = (
        total.amount_nanousd - total.cached_amount_nanousd - total.completion_amount_nanousd
    )
    uncached = total.prompt_tokens - total.cached_tokens
    return (
        Cost("prompt", prompt_nanousd, uncached, "tokens"),
        Cost("cached prompt", total.cached_amount_nanousd, total.cached_tokens, "tokens"),
        Cost("completion", total.completion_amount_nanousd, total.completion_tokens, "tokens"),
    )


def _kept_cost(item: LineItem, total: UsageSum) -> Cost:
    if total.kind == "correction":
        return Cost(item, total.amount_nanousd)
    # The only unit of bytes and time that OpenAI lists. Prices are for a GB, 10^9 bytes.
    quantity = total.kept_mb_s / _MB_S_PER_GIB_HOUR
    return Cost(item, total.amount_nanousd, quantity, "gibibyte_hours")
