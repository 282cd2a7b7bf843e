"""What one gateway counts by itself while Redis cannot: its share of every limit.

Rates start empty, each with 1 / num_gateways of its amount. Of seats, those that requests of
earlier epochs still take come first; of the others each gateway has its share:

    taken  <=  old + sum over gateways of floor((amount - old then) / num_gateways)  <=  amount

as `old`, the open holds of earlier epochs, only becomes less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from server.limiter.redis_states import Answer, Call, CarryNeeded
from server.limiter.rules import Grant, Limit
from server.limiter.states import States


class LocalShare:
    """One epoch of one gateway. Times are its own, in integer milliseconds.

    carry_ms: after which no request of an earlier epoch can be under way.
    """

    def __init__(self, num_gateways: int, *, born_ms: int, carry_ms: int, max_states: int) -> None:
        self._num_gateways = num_gateways
        self._carried_until_ms = born_ms + carry_ms
        self._max_states = max_states
        self._states = States(born_ms=born_ms, max_states=max_states)
        # Of each limit of seats that was asked for: when its old requests are over at the latest.
        self._carried: dict[tuple[str, str], dict[str, int]] = {}

    def run(self, call: Call, now_ms: int) -> Answer | CarryNeeded:
        """What the script would do, by this gateway's clock; but for `settle`."""
        if call.carried:
            self._carry(call.carried, now_ms)
        elif call.command == "acquire":
            unknown = tuple(limit for limit in call.limits if self._is_unknown(limit, now_ms))
            if unknown and len(self._carried) < self._max_states:
                return CarryNeeded(unknown)
        shares = tuple(self._share(limit, now_ms) for limit in call.limits)
        waits: list[int] = []
        if call.command == "acquire":
            waits = self._states.acquire(call.request_id, shares, call.units, call.lease_ms, now_ms)
        elif call.command == "check":
            waits = self._states.check(shares, now_ms)
        found = self._states.standings(shares, now_ms, with_holders=call.command == "standings")
        standings = tuple(
            replace(standing, limit=limit)
            for limit, standing in zip(call.limits, found, strict=True)
        )
        return Answer(0, tuple(waits), standings)

    def settle(self, grant: Grant, used_tokens: int | None, now_ms: int) -> None:
        self._states.settle(grant, used_tokens, now_ms)

    def leave(self, grant: Grant) -> None:
        """A request of an earlier epoch has ended."""
        for limit in grant.limits:
            self._carried.get((limit.scope, limit.scope_id), {}).pop(grant.request_id, None)

    def _carry(self, carried: Mapping[Limit, Sequence[tuple[str, int]]], now_ms: int) -> None:
        for limit, requests in carried.items():
            leases = {request_id: now_ms + left_ms for request_id, left_ms in requests}
            self._carried[limit.scope, limit.scope_id] = leases

    def _is_unknown(self, limit: Limit, now_ms: int) -> bool:
        return (
            limit.metric == "concurrency"
            and now_ms < self._carried_until_ms
            and (limit.scope, limit.scope_id) not in self._carried
        )

    def _share(self, limit: Limit, now_ms: int) -> Limit:
        amount = limit.amount
        if self._is_unknown(limit, now_ms):
            amount = 0
        elif limit.metric == "concurrency":
            leases = self._carried.get((limit.scope, limit.scope_id), {})
            amount -= sum(expires_ms > now_ms for expires_ms in leases.values())
        return replace(limit, amount=max(0, amount // self._num_gateways))
