"""The states of many limits: all are checked, then all charged. Callers pass times; none waits."""

from collections.abc import Sequence

from server.limits.bucket import WINDOW_MS, Bucket, Seats
from server.limits.calls import Call
from server.limits.rules import Grant, Limit, Metric, Standing

_SWEEP_MS = 1000
"""Milliseconds between two sweeps of a full table, after which a refused request may ask again."""

State = Bucket | Seats
Key = tuple[Metric, str, str]


class States:
    """One state per limit, at most `max_states`. Times are integer milliseconds.

    born_ms: the time at which a limit that was not seen before counts as used up; a minute later
    all of its amount is there.   states: by their limits.
    Only idle states are forgotten: after another the same minute's worth could be had twice.
    """

    def __init__(self, *, born_ms: int, max_states: int) -> None:
        self.born_ms = born_ms
        self._max_states = max_states
        self.states: dict[Key, State] = {}
        self._swept_ms = born_ms

    def acquire(self, call: Call, now_ms: int) -> list[int]:
        """Milliseconds to wait for each limit; all are 0 if all were charged."""
        waits, charges = [], []
        for limit in call.limits:
            if state := self._state(limit, now_ms):
                state.touch(limit.amount, now_ms)
                units = limit.units(call.tokens)
                waits.append(state.wait_ms(limit.amount, units, now_ms))
                charges.append((state, units))
            else:
                waits.append(_SWEEP_MS)
        if not any(waits):
            for state, units in charges:
                state.charge(call.request_id, units, call.lifetime_ms)
        return waits

    def note(self, call: Call, now_ms: int) -> None:
        """Charge a request that Redis let pass, under each limit for whose state there is room."""
        for limit in call.limits:
            if state := self._state(limit, now_ms):
                state.touch(limit.amount, now_ms)
                state.charge(call.request_id, limit.units(call.tokens), call.lifetime_ms)

    def check(self, call: Call, now_ms: int) -> list[int]:
        """Milliseconds to wait for each limit, of which none is charged."""
        return [
            self._view(limit).wait_ms(limit.amount, limit.units(call.tokens), now_ms)
            for limit in call.limits
        ]

    def release(self, grant: Grant, used_tokens: int | None, now_ms: int) -> None:
        for limit in grant.limits:
            state = self.states.get(_key(limit))
            if state is not None:
                state.release(grant.request_id, limit.units(used_tokens), now_ms)

    def standings(
        self, limits: Sequence[Limit], now_ms: int, *, with_holders: bool = False
    ) -> tuple[Standing, ...]:
        return tuple(
            self._view(limit).standing(limit, now_ms, with_holders=with_holders) for limit in limits
        )

    def _state(self, limit: Limit, now_ms: int) -> State | None:
        """The state of a limit; None if there is no room for another."""
        state = self.states.get(_key(limit))
        if state is None:
            if len(self.states) >= self._max_states:
                self._forget_idle(now_ms)
            if len(self.states) >= self._max_states:
                return None
            state = self.states[_key(limit)] = self._new(limit)
        return state

    def _view(self, limit: Limit) -> State:
        return self.states.get(_key(limit)) or self._new(limit)

    def _new(self, limit: Limit) -> State:
        if limit.metric == "concurrency":
            return Seats(self.born_ms)
        return Bucket(limit.amount, limit.amount * WINDOW_MS, self.born_ms)

    def _forget_idle(self, now_ms: int) -> None:
        # In its first minute a forgotten state would come back with more backlog than it had.
        if now_ms < max(self._swept_ms + _SWEEP_MS, self.born_ms + WINDOW_MS):
            return
        self._swept_ms = now_ms
        self.states = {
            key: state for key, state in self.states.items() if not state.is_idle(now_ms)
        }


def _key(limit: Limit) -> Key:
    return limit.metric, limit.scope, limit.scope_id
