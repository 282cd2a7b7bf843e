"""Queue of the adapters that wait for one kind of move between tiers."""

import heapq
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from lora.entry import Entry, Urgency

_MOST_STALE = 64


@dataclass(slots=True)
class _Turn:
    """A waiting adapter, its tenant, and its urgency when the queue last looked at it."""

    entry: Entry
    tenant_id: str
    urgency: Urgency

    def rank(self, num_under_way: int) -> tuple[int, int, int]:
        """Key of the order of moves. num_under_way: moves of the tenant."""
        priority, arrival = self.urgency
        return priority, num_under_way, arrival


class LoadQueue:
    """Adapters that wait for one kind of move. The requests that wait for an adapter decide its
    turn: the higher class first, then the tenant with the fewest moves under way, then arrival.

    max_under_way: moves that may be begun and not done.
    """

    def __init__(self, max_under_way: int) -> None:
        self.max_under_way = max_under_way
        self._waiting: dict[str, _Turn] = {}
        # By tenant, a heap of (urgency, key); outdated entries are skipped.
        self._lines: dict[str, list[tuple[Urgency, str]]] = {}
        self._under_way: dict[str, str] = {}  # key -> the tenant it counts for

    def add(self, entry: Entry) -> None:
        """Queue an adapter, or move it up for its newest waiter, who may be another tenant's."""
        turn = self._waiting.get(entry.key)
        if turn is None:
            self._stand(entry, entry.urgency)
            return
        urgency = min(turn.urgency, entry.newest_urgency)
        if (urgency, entry.claim.tenant_id) != (turn.urgency, turn.tenant_id):
            self._stand(entry, urgency)

    def discard(self, key: str) -> None:
        """Remove an adapter that nothing wants any more; a move under way goes on."""
        self._waiting.pop(key, None)

    def start_next(self, may_start: Callable[[Entry], bool]) -> Entry | None:
        """Mark the most urgent adapter as under way and return it; None if no adapter waits, if it
        may not start, or if `max_under_way` moves are under way.
        """
        if not self._waiting or len(self._under_way) >= self.max_under_way:
            return None
        busy = Counter(self._under_way.values())
        turn = min(self._heads(), key=lambda turn: turn.rank(busy[turn.tenant_id]))
        if not may_start(turn.entry):
            return None
        del self._waiting[turn.entry.key]
        self._under_way[turn.entry.key] = turn.tenant_id
        return turn.entry

    def done(self, key: str) -> None:
        del self._under_way[key]

    def check_integrity(self, waiting: Set[str], under_way: Set[str]) -> None:
        """Assert that exactly these adapters wait, and that these moves are under way."""
        assert self._waiting.keys() == waiting
        assert self._under_way.keys() == under_way
        assert len(self._under_way) <= self.max_under_way
        for key, turn in self._waiting.items():
            assert (turn.urgency, key) in self._lines[turn.tenant_id], "it is in no line"

    def _stand(self, entry: Entry, urgency: Urgency) -> None:
        turn = self._waiting[entry.key] = _Turn(entry, entry.claim.tenant_id, urgency)
        line = self._lines.setdefault(turn.tenant_id, [])
        heapq.heappush(line, (urgency, entry.key))
        if len(line) > 2 * len(self._waiting) + _MOST_STALE:
            line[:] = [stand for stand in line if self._is_current(turn.tenant_id, *stand)]
            heapq.heapify(line)

    def _is_current(self, tenant_id: str, urgency: Urgency, key: str) -> bool:
        turn = self._waiting.get(key)
        return turn is not None and (turn.tenant_id, turn.urgency) == (tenant_id, urgency)

    def _heads(self) -> list[_Turn]:
        """First turn of every tenant's line."""
        heads = []
        for tenant_id in list(self._lines):
            if (head := self._head(tenant_id)) is not None:
                heads.append(head)
            else:
                del self._lines[tenant_id]
        return heads

    def _head(self, tenant_id: str) -> _Turn | None:
        line = self._lines[tenant_id]
        while line:
            urgency, key = line[0]
            if not self._is_current(tenant_id, urgency, key):
                heapq.heappop(line)
                continue
            turn = self._waiting[key]
            if (now := turn.entry.urgency) == urgency:
                return turn
            turn.urgency = now  # the most urgent waiter has left
            heapq.heapreplace(line, (now, key))
        return None
