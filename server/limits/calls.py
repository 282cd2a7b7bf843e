"""Calls of a limiter: what is asked of all limits of one request, and what is answered."""

from dataclasses import dataclass
from typing import Any, Literal

from server.limits.rules import Holder, Limit, Standing


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a call.

    waits: milliseconds to wait for each limit, all 0 if the request passes; empty if no units were
    asked for.   age_ms: time since Redis lost its counts; None if Redis was not asked.
    """

    waits: tuple[int, ...] = ()
    standings: tuple[Standing, ...] = ()
    age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in memory or of `limits.lua`, whose comment describes the arguments.

    tokens: asked for, or used; None for a request that never ran.
    """

    command: Literal["acquire", "check", "release", "standings"]
    limits: tuple[Limit, ...]
    tokens: int | None = None
    request_id: str = ""
    lifetime_ms: int = 0

    def keys(self, prefix: str) -> list[str]:
        names = [f"{prefix}:{it.metric}:{it.scope}:{it.scope_id}" for it in self.limits]
        return [f"{prefix}:born", *names]

    def arguments(self, *, has_counted: bool = False) -> list[str | int]:
        """has_counted: whether Redis has answered this gateway before."""
        # Redis' own clock counts, which all gateways share.
        found: list[str | int] = [self.command, "", self.request_id, self.lifetime_ms]
        found.append(int(has_counted))
        for limit in self.limits:
            kind = "seats" if limit.metric == "concurrency" else "rate"
            found += [kind, limit.amount, limit.units(self.tokens)]
        return found

    def read(self, reply: list[Any]) -> Answer:
        """Decode the script's reply."""
        age_ms, waits, *each = reply
        standings = tuple(
            Standing(
                limit=limit,
                remaining=remaining,
                reset_ms=reset_ms,
                holders=tuple(Holder(holder.decode(), *rest) for holder, *rest in holders),
            )
            for limit, remaining, reset_ms, holders in zip(self.limits, *each, strict=True)
        )
        return Answer(tuple(waits), standings, age_ms)
