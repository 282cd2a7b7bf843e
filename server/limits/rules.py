"""What is limited, and what a limiter says of it: plain data, whoever keeps the state.

Times are integer milliseconds on the limiter's own clock, which never runs backwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Metric = Literal["requests", "tokens", "concurrency"]
Scope = Literal["tenant", "key", "adapter"]

SEAT_SLACK_S = 5.0
"""A request's seat outlives its deadline, so that no clock difference frees it too early."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `amount` requests or tokens a minute, or requests at a time."""

    metric: Metric
    scope: Scope
    scope_id: str
    amount: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A request under way that takes some of a limit. expires_ms: from now; then it is let go."""

    request_id: str
    units: int
    expires_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One limit as it is now.

    remaining: what could be asked for now; 0 also in debt.   reset_ms: until all of it is there
    again if nobody asks; of concurrency, until the time of the first one runs out.
    holders: the requests under way, the oldest first; only where they were asked for.
    """

    limit: Limit
    remaining: int
    reset_ms: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one request was charged, until it is released, once. It expires by itself.

    tokens: that were asked for; each limit was charged at most its amount.
    epoch: of the gateways' way of counting, to be written with the hold; None for one gateway.
    standings: of its limits after the charge, in their order.
    """

    request_id: str
    limits: tuple[Limit, ...]
    tokens: int
    epoch: int | None
    standings: tuple[Standing, ...]


class RateLimited(Exception):
    """A limit is reached; nothing was charged.

    limit: the one that takes longest to free.   retry_after_ms: until the same request would pass
    if nothing else happens.   is_degraded: it might pass if the limiter had not lost its state.
    standings: of all limits that were asked for.
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
        whose = {"tenant": "your account", "key": "this API key", "adapter": "this adapter"}
        super().__init__(
            f"Rate limit reached for {whose[limit.scope]}: {limit.amount} {noun} {per}. "
            f"Try again in {max(1, -(-retry_after_ms // 1000))} s."
        )


class Limiter(Protocol):
    """All limits of all requests."""

    @property
    def is_degraded(self) -> bool:
        """It lost its state, or counts a share only: it may refuse early, never late."""

    async def start(self) -> None:
        """Before anything else."""

    async def run(self) -> None:
        """What has to be done all the time, until it is cancelled."""

    async def close(self) -> None:
        """After everything else."""

    async def acquire(
        self, request_id: str, limits: Sequence[Limit], *, tokens: int, lifetime_ms: int
    ) -> Grant:
        """Charge one request, its tokens and its seat under every limit, or none under any.

        lifetime_ms: after which the request cannot be under way any more. Raises RateLimited.
        """

    async def check(self, limits: Sequence[Limit]) -> None:
        """Whether one request and its seat would pass now; charges nothing. Raises RateLimited."""

    def release(self, grant: Grant, used_tokens: int | None) -> None:
        """The request ended: refund what it did not use, owe what it used beyond; leave the seat.

        used_tokens: None if it never ran, then the request itself is refunded too. The second time
        is nothing. Never waits.
        """

    async def standings(self, limits: Sequence[Limit]) -> list[Standing]:
        """Each limit as it is now, with its holders."""

    async def refresh(self) -> None:
        """After StaleEpoch, before `acquire` is called again."""
