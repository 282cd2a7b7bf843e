"""The states of many limits: all are checked, then all charged. Callers pass times; none waits."""

from collections.abc import Sequence

from server.limits.bucket import WINDOW_MS, Bucket, Seats
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

    def acquire(
        self,
        request_id: str,
        limits: Sequence[Limit],
        tokens: int,
        lifetime_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Milliseconds to wait for each limit; all are 0 if all were charged."""
        waits = []
        states = []
        for limit in limits:
            state = self._state(limit, now_ms)
            states.append(state)
            if state is None:
                waits.append(_SWEEP_MS)
            else:
                state.touch(limit.amount, now_ms)
                asked = units_of(limit.metric, tokens)
                waits.append(state.wait_ms(limit.amount, asked, now_ms))
        if not any(waits):
            for state, limit in zip(states, limits, strict=True):
                assert state is not None
                state.charge(request_id, units_of(limit.metric, tokens), lifetime_ms)
        return waits

    def note(
        self,
        request_id: str,
        limits: Sequence[Limit],
        tokens: int,
        lifetime_ms: int,
        now_ms: int,
    ) -> None:
        """Charge a request that Redis let pass, under each limit for whose state there is room."""
        for limit in limits:
            if state := self._state(limit, now_ms):
                state.touch(limit.amount, now_ms)
                state.charge(request_id, units_of(limit.metric, tokens), lifetime_ms)

    def check(self, limits: Sequence[Limit], tokens: int, now_ms: int) -> list[int]:
        """Milliseconds to wait for each limit, of which none is charged."""
        return [
            self._view(limit).wait_ms(limit.amount, units_of(limit.metric, tokens), now_ms)
            for limit in limits
        ]

    def release(self, grant: Grant, used_tokens: int | None, now_ms: int) -> None:
        for limit in grant.limits:
            state = self.states.get(_key(limit))
            if state is not None:
                state.release(grant.request_id, units_of(limit.metric, used_tokens), now_ms)

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


def units_of(metric: Metric, tokens: int | None) -> int:
    """Units of a limit for one request.   tokens: None if it never ran."""
    if tokens is None:
        return 0
    return tokens if metric == "tokens" else 1


def _key(limit: Limit) -> Key:
    return limit.metric, limit.scope, limit.scope_id
