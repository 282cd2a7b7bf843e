"""The states of all limits in Redis: every call is one script, one round trip, one deadline.

StateLost   Redis answers, but does not know this epoch: Redis was wiped, or restarted empty
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from server.limits.redis_calls import RedisCalls
from server.limits.rules import Grant, Holder, Limit, Standing
from server.limits.states import asked_units, used_units

SCRIPT = resources.files("server.limits").joinpath("limits.lua").read_text()

CARRIED = "~"
"""Prefix of the request id of a seat that was carried from an earlier epoch."""


class StateLost(Exception):
    """Redis does not know the epoch; nothing was charged."""


@dataclass(frozen=True, slots=True)
class CarryNeeded:
    """Nothing was charged: the seats of open holds must first be added to these limits."""

    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a call.

    age_ms: age of the epoch.   waits: milliseconds to wait for each limit, all 0 if it passed.
    """

    age_ms: int
    waits: tuple[int, ...]
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the script, whose comment describes the arguments.

    clock_ms: the time; None for Redis' own clock, which all gateways share.
    carried: for limits of seats, the (request_id, left_ms) of earlier epochs' requests.
    """

    command: Literal["acquire", "check", "release", "standings"]
    limits: tuple[Limit, ...]
    units: tuple[int, ...]
    request_id: str = ""
    lifetime_ms: int = 0
    carry_ms: int = 0
    carried: Mapping[Limit, Sequence[tuple[str, int]]] = field(default_factory=dict)
    clock_ms: int | None = None

    def keys(self, prefix: str) -> list[str]:
        names = [f"{prefix}:{it.metric}:{it.scope}:{it.scope_id}" for it in self.limits]
        return [f"{prefix}:born", *names]

    def arguments(self) -> list[str | int]:
        clock_ms = "" if self.clock_ms is None else self.clock_ms
        found: list[str | int] = [self.command, clock_ms, self.request_id, self.lifetime_ms]
        found += [self.carry_ms, self._carried_json()]
        for limit, units in zip(self.limits, self.units, strict=True):
            found += ["seats" if limit.metric == "concurrency" else "rate", limit.amount, units]
        return found

    def _carried_json(self) -> str:
        if not self.carried:
            return ""
        return json.dumps(
            {
                index: [(CARRIED + name, left_ms) for name, left_ms in self.carried[limit]]
                for index, limit in enumerate(self.limits, 1)
                if limit in self.carried
            }
        )

    def read(self, reply: list[Any]) -> Answer | CarryNeeded:
        """Decode the script's reply. Raises StateLost."""
        if reply[0] == b"lost":
            raise StateLost
        if reply[0] == b"carry":
            return CarryNeeded(tuple(self.limits[index - 1] for index in reply[1:]))
        _, age_ms, waits, *each = reply
        standings = tuple(
            Standing(
                limit=limit,
                remaining=remaining,
                reset_ms=reset_ms,
                holders=tuple(_holder(*holder) for holder in holders),
            )
            for limit, remaining, reset_ms, holders in zip(self.limits, *each, strict=True)
        )
        return Answer(age_ms, tuple(waits), standings)


def acquire_call(
    request_id: str, limits: Sequence[Limit], tokens: int, lifetime_ms: int, carry_ms: int = 0
) -> Call:
    return Call(
        command="acquire",
        limits=tuple(limits),
        units=tuple(asked_units(limit.metric, tokens) for limit in limits),
        request_id=request_id,
        lifetime_ms=lifetime_ms,
        carry_ms=carry_ms,
    )


def check_call(limits: Sequence[Limit], tokens: int) -> Call:
    """A call that asks whether one request of so many tokens would pass."""
    units = tuple(asked_units(limit.metric, tokens) for limit in limits)
    return Call(command="check", limits=tuple(limits), units=units)


def release_call(grant: Grant, used_tokens: int | None, carry_ms: int = 0) -> Call:
    return Call(
        command="release",
        limits=grant.limits,
        units=tuple(used_units(limit.metric, used_tokens) for limit in grant.limits),
        request_id=grant.request_id,
        carry_ms=carry_ms,
    )


def leave_call(grant: Grant, carry_ms: int) -> Call:
    """A call that releases the seats of a grant of an earlier epoch, if they were carried."""
    seats = tuple(limit for limit in grant.limits if limit.metric == "concurrency")
    return Call(
        command="release",
        limits=seats,
        units=(1,) * len(seats),
        request_id=CARRIED + grant.request_id,
        carry_ms=carry_ms,
    )


def standings_call(limits: Sequence[Limit]) -> Call:
    return Call(command="standings", limits=tuple(limits), units=(0,) * len(limits))


class RedisStates:
    """The states in one Redis.   deadline_s: seconds that one call may take."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self._calls = RedisCalls(url, SCRIPT, deadline_s=deadline_s)

    async def run(self, prefix: str, call: Call) -> Answer | CarryNeeded:
        """Run a call. Raises StateLost, StateUnavailable."""
        return call.read(await self._calls.evaluate(call.keys(prefix), call.arguments()))

    async def begin(self, prefix: str, *, is_first: bool) -> None:
        """Make an epoch known in Redis before other gateways know of it. Raises StateUnavailable.

        is_first: nothing was ever counted before, so that every limit has all of its amount.
        """
        # With 0 an epoch is born at its first call, which comes after all calls of the one before.
        await self._calls.set_new(f"{prefix}:born", 1 if is_first else 0)

    async def ping(self) -> None:
        """Check that Redis answers. Raises StateUnavailable."""
        await self._calls.ping()

    async def close(self) -> None:
        await self._calls.close()


def _holder(request_id: bytes, units: int, expires_ms: int) -> Holder:
    return Holder(request_id.decode().removeprefix(CARRIED), units, expires_ms)
