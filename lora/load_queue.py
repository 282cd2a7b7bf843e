"""Queue of the adapters that wait for one kind of move between tiers."""

from collections import Counter
from collections.abc import Callable, Set

from lora.entry import Entry, Urgency
from lora.heap_dict import HeapDict


class LoadQueue:
    """Adapters that wait for one kind of move. The requests that wait for an adapter decide its
    turn: the higher class first, then the tenant with the fewest moves under way, then arrival.

    max_under_way: moves that may be begun and not done.
    """

    def __init__(self, max_under_way: int) -> None:
        self.max_under_way = max_under_way
        self._waiting: dict[str, tuple[Entry, str]] = {}  # with the tenant in whose line it is
        self._lines: dict[str, HeapDict[str, Urgency]] = {}  # by tenant
        self._under_way: dict[str, str] = {}  # key -> the tenant it counts for

    def add(self, entry: Entry) -> None:
        """Queue an adapter, or give a waiting one the turn that its requests now decide."""
        tenant_id, urgency = entry.claim.tenant_id, entry.urgency
        line = self._lines.get(tenant_id)
        if line is None or line.get(entry.key) != urgency:
            self.discard(entry.key)
            self._waiting[entry.key] = entry, tenant_id
            self._lines.setdefault(tenant_id, HeapDict())[entry.key] = urgency

    def discard(self, key: str) -> None:
        """Remove an adapter from its line, if it waits; a move under way goes on."""
        if key in self._waiting:
            _, tenant_id = self._waiting.pop(key)
            line = self._lines[tenant_id]
            del line[key]
            if not line:
                del self._lines[tenant_id]

    def start_next(self, may_start: Callable[[Entry], bool]) -> Entry | None:
        """Mark the most urgent adapter as under way and return it; None if no adapter waits, if it
        may not start, or if `max_under_way` moves are under way.
        """
        if not self._lines or len(self._under_way) >= self.max_under_way:
            return None
        busy = Counter(self._under_way.values())

        def rank(tenant_id: str) -> tuple[int, int, int]:
            line = self._lines[tenant_id]
            priority, arrival = line[line.first()]
            return priority, busy[tenant_id], arrival

        tenant_id = min(self._lines, key=rank)
        entry, _ = self._waiting[self._lines[tenant_id].first()]
        if not may_start(entry):
            return None
        self.discard(entry.key)
        self._under_way[entry.key] = tenant_id
        return entry

    def done(self, key: str) -> None:
        del self._under_way[key]

    def check_integrity(self, waiting: Set[str], under_way: Set[str]) -> None:
        """Assert that exactly these adapters wait, and that these moves are under way."""
        assert self._waiting.keys() == waiting
        assert self._under_way.keys() == under_way
        assert len(self._under_way) <= self.max_under_way
        lines = {(key, tenant_id) for tenant_id, line in self._lines.items() for key in line}
        assert lines == {(key, tenant_id) for key, (_, tenant_id) in self._waiting.items()}
        for entry, tenant_id in self._waiting.values():
            assert self._lines[tenant_id][entry.key] == entry.urgency
