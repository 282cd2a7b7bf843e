"""Prices tokens and storage: integer arithmetic without a database, so that payers can repeat it.

Money is integer nano-dollars; one nano-dollar a token is 0.001 dollars a million tokens. A GB is
10^9 bytes, a month is 30 days.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from server.text.times import DAY_MS, HOUR_MS

GB_HOUR = 10**9 * HOUR_MS
"""Bytes times milliseconds in a gigabyte-hour."""
_PARTS = ("prompt", "cached", "completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices in nano-dollars a token."""

    prompt_nanousd: int
    cached_nanousd: int
    completion_nanousd: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The prices in a row, or in a receipt; one that is None is 0."""
        return cls(**{field.name: row[field.name] or 0 for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(TokenPrices):
    """Token prices, and prices in nano-dollars for a GB for an hour.

    storage_nanousd: in the object store.   pinned_nanousd: pinned in device memory.
    resident_nanousd: in device memory without being pinned.
    """

    storage_nanousd: int
    pinned_nanousd: int
    resident_nanousd: int = 0


@dataclass(frozen=True, slots=True)
class TokenAmounts:
    """Costs of a request's parts, in nano-dollars; `prompt` leaves the cached tokens out."""

    prompt: int
    cached: int
    completion: int

    @property
    def total(self) -> int:
        return self.prompt + self.cached + self.completion


FREE = TokenAmounts(0, 0, 0)


def token_amounts(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, price: TokenPrices
) -> TokenAmounts:
    """Return the price of tokens. prompt_tokens includes cached_tokens, which are priced once."""
    assert adds_up(prompt_tokens, cached_tokens, completion_tokens)
    return TokenAmounts(
        (prompt_tokens - cached_tokens) * price.prompt_nanousd,
        cached_tokens * price.cached_nanousd,
        completion_tokens * price.completion_nanousd,
    )


def amount_nanousd(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, price: TokenPrices
) -> int:
    return token_amounts(prompt_tokens, cached_tokens, completion_tokens, price).total


def rated_amounts(
    finish_reason: str,
    stop_cause: str,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    price: TokenPrices,
    *,
    is_failed: bool = False,
) -> TokenAmounts:
    """Return the amounts that a request pays: the price of its tokens, or nothing.

    is_failed: the answer was an error that is free.
    """
    counts = prompt_tokens, cached_tokens, completion_tokens
    is_free = is_failed or is_free_error(finish_reason, stop_cause, completion_tokens)
    return FREE if is_free or not adds_up(*counts) else token_amounts(*counts, price)


def adds_up(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> bool:
    """Whether counts can be priced; if not, nobody is charged and a person has to look."""
    return 0 <= cached_tokens <= prompt_tokens and completion_tokens >= 0


def rate(event: Mapping[str, Any], price: TokenPrices) -> TokenAmounts:
    """Return the amounts of a usage event, or of its receipt, under a price."""
    prompt, cached, completion = (int(event[f"{name}_tokens"] or 0) for name in _PARTS)
    end = event["finish_reason"], event["stop_cause"]
    is_failed = bool(event["is_failed"])
    return rated_amounts(*end, prompt, cached, completion, price, is_failed=is_failed)


def is_free_error(finish_reason: str, stop_cause: str, completion_tokens: int) -> bool:
    """Whether a request with this end is answered with an error, and nothing is billed for it.

    The server broke it, or generated no token in time. A client that hangs up, runs into its
    deadline or demands too slow a grammar pays for its tokens.
    """
    if stop_cause in ("engine_failure", "gateway_lost"):
        return True
    if stop_cause in ("deadline", "first_token_timeout") and completion_tokens == 0:
        return True
    return finish_reason == "error" and stop_cause not in ("deadline", "constraint_too_slow")


def kept_amount(size_bytes: int, duration_ms: int, gb_hour_nanousd: int) -> int:
    """Return the price of bytes kept for a time, to the nearest nano-dollar, halves up."""
    return (size_bytes * duration_ms * gb_hour_nanousd + GB_HOUR // 2) // GB_HOUR


def monthly_storage_nanousd(size_bytes: int, price: Prices) -> int:
    """Return the price of an object in the store for 30 days."""
    return kept_amount(size_bytes, 30 * DAY_MS, price.storage_nanousd)


def hourly_pin_nanousd(size_bytes: int, price: Prices) -> int:
    """Return the price of an adapter that is pinned in device memory for an hour."""
    return kept_amount(size_bytes, HOUR_MS, price.pinned_nanousd)


def format_usd(nanousd: int) -> str:
    """Format nano-dollars as exact decimal dollars with nine places."""
    sign = "-" if nanousd < 0 else ""
    dollars, rest = divmod(abs(nanousd), 1_000_000_000)
    return f"{sign}{dollars}.{rest:09d}"
