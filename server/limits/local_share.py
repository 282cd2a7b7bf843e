"""The share of every limit that one gateway counts by itself while Redis cannot count.

Rates start empty, each with 1 / num_gateways of its amount. Seats that requests of earlier epochs
still take are subtracted first; each gateway has its share of the others:

    taken  <=  old + sum over gateways of floor((amount - read) / num_gateways)  <=  amount

old: seats of earlier epochs.   read: the open holds when that gateway looked last, without its own
of this epoch. `read` includes all of `old`, which only becomes less, and other gateways' holds of
this epoch as well, so that fewer seats than the amount may be given away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from server.limits.redis_states import Answer, Call, CarryNeeded
from server.limits.rules import Grant, Limit
from server.limits.states import States

_READ_MS = 1000
"""Milliseconds after which the holds of a limit that is asked for are read again."""


class LocalShare:
    """One gateway's share in one epoch. Times are the gateway's own, in integer milliseconds.

    carry_ms: time after which no request of an earlier epoch can be under way.
    """

    def __init__(self, num_gateways: int, *, born_ms: int, carry_ms: int, max_states: int) -> None:
        self._num_gateways = num_gateways
        self._carried_until_ms = born_ms + carry_ms
        self._max_states = max_states
        self._states = States(born_ms=born_ms, max_states=max_states)
        # For each limit of seats that was asked for: when its holds were read, and when each
        # request among them is over at the latest.
        self._carried: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}

    def run(self, call: Call, now_ms: int) -> Answer | CarryNeeded:
        """Do what the script does, by this gateway's clock, for all commands but `release`."""
        if call.carried:
            self._carry(call.carried, now_ms)
        elif old := tuple(limit for limit in call.limits if self._is_old(limit, now_ms)):
            return CarryNeeded(old)
        shares = tuple(self._share(limit, now_ms) for limit in call.limits)
        waits: list[int] = []
        if call.command == "acquire":
            waits = self._states.acquire(
                call.request_id, shares, call.units, call.lifetime_ms, now_ms
            )
        elif call.command == "check":
            waits = self._states.check(shares, call.units, now_ms)
        found = self._states.standings(shares, now_ms, with_holders=call.command == "standings")
        standings = tuple(
            replace(standing, limit=limit)
            for limit, standing in zip(call.limits, found, strict=True)
        )
        return Answer(0, tuple(waits), standings)

    def release(self, grant: Grant, used_tokens: int | None, now_ms: int) -> None:
        self._states.release(grant, used_tokens, now_ms)

    def leave(self, grant: Grant) -> None:
        """Note that a request of an earlier epoch has ended."""
        for limit in grant.limits:
            if limit.metric == "concurrency" and _key(limit) in self._carried:
                self._carried[_key(limit)][1].pop(grant.request_id, None)

    def _carry(self, carried: Mapping[Limit, Sequence[tuple[str, int]]], now_ms: int) -> None:
        for limit, requests in carried.items():
            if _key(limit) not in self._carried and len(self._carried) >= self._max_states:
                continue
            (standing,) = self._states.standings([limit], now_ms, with_holders=True)
            own = {holder.request_id for holder in standing.holders}
            expiries = {key: now_ms + left_ms for key, left_ms in requests if key not in own}
            self._carried[_key(limit)] = now_ms, expiries

    def _is_old(self, limit: Limit, now_ms: int) -> bool:
        """Whether the holds of a limit have to be read, for the first time or again."""
        if limit.metric != "concurrency" or now_ms >= self._carried_until_ms:
            return False
        read_ms, _ = self._carried.get(_key(limit), (now_ms - _READ_MS, {}))
        return now_ms >= read_ms + _READ_MS

    def _share(self, limit: Limit, now_ms: int) -> Limit:
        amount = limit.amount
        if limit.metric == "concurrency" and now_ms < self._carried_until_ms:
            if _key(limit) not in self._carried:
                return replace(limit, amount=0)
            _, expiries = self._carried[_key(limit)]
            amount -= sum(expires_ms > now_ms for expires_ms in expiries.values())
        return replace(limit, amount=max(0, amount // self._num_gateways))


def _key(limit: Limit) -> tuple[str, str]:
    return limit.scope, limit.scope_id
