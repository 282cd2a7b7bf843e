"""What things cost: arithmetic on integers, no database, the same for the one who pays.

Money is integer nano-dollars; one nano-dollar a token is 0.001 dollars a million. A GB is 10^9
bytes, a month is 30 days.
"""

from dataclasses import dataclass

_GB_HOUR = 10**9 * 3_600_000
"""Bytes times milliseconds."""
_HOUR_MS = 3_600_000
_MONTH_MS = 30 * 24 * _HOUR_MS

_CLIENT_FAULTS = ("adapter_incompatible", "adapter_too_large", "adapter_not_invoked")
"""Stop causes of requests that are answered with a 400: they are free, and no failure of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Nano-dollars a token."""

    prompt_nanousd: int
    cached_nanousd: int
    completion_nanousd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(TokenPrices):
    """Of a GB for an hour: storage_nanousd in the store, pinned_nanousd kept in device memory,
    resident_nanousd there without being pinned.
    """

    storage_nanousd: int
    pinned_nanousd: int
    resident_nanousd: int = 0


@dataclass(frozen=True, slots=True)
class TokenAmounts:
    """What the parts of a request cost, in nano-dollars; cached tokens are in one part only."""

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
    """The price of these tokens. prompt_tokens includes cached_tokens, which are priced once."""
    assert 0 <= cached_tokens <= prompt_tokens
    assert completion_tokens >= 0
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
    """What a request that ended like this pays: its tokens' price, or nothing.

    is_failed: the gateway answered with an error of ours. Counts that cannot be are for a person to
    look at, and free.
    """
    adds_up = 0 <= cached_tokens <= prompt_tokens and completion_tokens >= 0
    is_late = _is_late(stop_cause, completion_tokens)
    if is_failed or is_late or not adds_up or not is_billable(finish_reason, stop_cause):
        return FREE
    return token_amounts(prompt_tokens, cached_tokens, completion_tokens, price)


def is_billable(finish_reason: str, stop_cause: str) -> bool:
    """Whether this end is paid for: what we broke is counted and rated 0.

    A client that hangs up pays for what was generated, and so does one that runs into its deadline.
    """
    if stop_cause in ("engine_failure", "gateway_lost"):
        return False
    return finish_reason != "error" or stop_cause == "deadline"


def is_our_failure(finish_reason: str, stop_cause: str, completion_tokens: int) -> bool:
    """Whether a request that ended like this is answered with an error of ours, not with a 400."""
    if _is_late(stop_cause, completion_tokens):
        return True
    return not is_billable(finish_reason, stop_cause) and stop_cause not in _CLIENT_FAULTS


def _is_late(stop_cause: str, completion_tokens: int) -> bool:
    """Whether nothing was generated in time, so the client got an error, not an answer."""
    return stop_cause in ("deadline", "first_token_timeout") and completion_tokens == 0


def kept_amount(size_bytes: int, duration_ms: int, gb_hour_nanousd: int) -> int:
    """Of bytes that were kept for a time; to the nearest nano-dollar, halves up."""
    return (size_bytes * duration_ms * gb_hour_nanousd + _GB_HOUR // 2) // _GB_HOUR


def monthly_storage_nanousd(size_bytes: int, price: Prices) -> int:
    """Of an object in the store, for 30 days."""
    return kept_amount(size_bytes, _MONTH_MS, price.storage_nanousd)


def hourly_pin_nanousd(size_bytes: int, price: Prices) -> int:
    """Of an adapter that is kept in device memory."""
    return kept_amount(size_bytes, _HOUR_MS, price.pinned_nanousd)


def format_usd(nanousd: int) -> str:
    """Nano-dollars as exact decimal dollars, nine places."""
    sign = "-" if nanousd < 0 else ""
    dollars, rest = divmod(abs(nanousd), 1_000_000_000)
    return f"{sign}{dollars}.{rest:09d}"
