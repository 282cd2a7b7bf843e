"""Limits, grants and answers of a limiter: plain data that does not depend on where the state is.

Times are integer milliseconds on the limiter's own clock, which never runs backwards.
"""

from dataclasses import dataclass, replace
from typing import Literal

from registry.errors import Fault, Limited

Metric = Literal["requests", "tokens", "concurrency"]
Scope = Literal["tenant", "key", "adapter", "base"]

SEAT_SLACK_S = 20.0
"""Seconds by which a seat outlives its request's deadline in the engine: the prompt is tokenized
before, and clocks differ and must not free the seat too early.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit to `amount` requests or tokens a minute, or to `amount` requests at a time."""

    metric: Metric
    scope: Scope
    scope_id: str
    amount: int

    def units(self, tokens: int | None) -> int:
        """Units of it that one request takes.   tokens: None for a request that never ran."""
        if tokens is None:
            return 0
        return tokens if self.metric == "tokens" else 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A request under way that takes some of a limit.   expires_ms: time until it is let go."""

    request_id: str
    units: int
    expires_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One limit as it is now.

    remaining: what a request could ask for now; 0 also in debt.   reset_ms: time until the whole
    amount is there again if no request comes; for concurrency, until the first seat's time runs
    out.   holders: the requests under way, the oldest first; empty unless asked for.
    """

    limit: Limit
    remaining: int
    reset_ms: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The charge of one request, which is released once, or expires by itself.

    standings: those of its limits after the charge, in their order.
    is_in_redis: whether Redis has the charge, or a part of it.
    """

    request_id: str
    limits: tuple[Limit, ...]
    standings: tuple[Standing, ...]
    is_in_redis: bool = False

    def joined(self, later: "Grant") -> "Grant":
        """One grant for both, of one request under different limits."""
        return replace(
            later,
            limits=self.limits + later.limits,
            standings=self.standings + later.standings,
            is_in_redis=self.is_in_redis or later.is_in_redis,
        )


class RateLimited(Fault):
    """A limit is reached; nothing was charged.

    limit: the limit that takes longest to free.   retry_after_ms: time until the same request would
    pass if nothing else happens.   is_degraded: the request might pass if the limiter had not lost
    its state.   standings: those of all limits that were asked for.
    """

    def __init__(
        self,
        limit: Limit,
        *,
        retry_after_ms: int,
        standings: tuple[Standing, ...],
        is_degraded: bool = False,
    ) -> None:
        self.limit = limit
        self.retry_after_ms = retry_after_ms
        self.standings = standings
        self.is_degraded = is_degraded
        per = "at a time" if limit.metric == "concurrency" else "per minute"
        noun = "requests" if limit.metric == "concurrency" else limit.metric
        whose = {
            "tenant": "your account",
            "key": "this API key or one above it",
            "adapter": "this adapter",
            "base": "your account on this base model",
        }
        super().__init__(
            f"Rate limit reached for {whose[limit.scope]}: {limit.amount} {noun} {per}. "
            f"Try again in {max(1, -(-retry_after_ms // 1000))} s.",
            code=Limited.default_code,
            retry_after_s=retry_after_ms / 1000,
            details={"limiter_degraded": True} if is_degraded else None,
        )
