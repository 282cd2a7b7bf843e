"""The last decisions on how many engines a pool has, with their reasons, for the operator."""

from collections import deque
from dataclasses import dataclass

from server.database.clock import now_ms

MAX_DECISIONS = 50


@dataclass(frozen=True, slots=True)
class Decision:
    """A number of engines that was asked for.   reason: a clause without a full stop."""

    at_ms: int
    num_engines: int
    reason: str


class Decisions:
    """The last MAX_DECISIONS decisions, oldest first."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def note(self, num_engines: int, reason: str) -> None:
        self._decisions.append(Decision(now_ms(), num_engines, reason))

    def newest_first(self) -> list[Decision]:
        return list(reversed(self._decisions))
