"""Adapters whose next move has not begun, and how many moves may be under way."""

from collections import Counter
from collections.abc import Callable

from lora.entry import Entry


class LoadQueue:
    """One kind of move. Who waits for an adapter decides when its turn is: the higher class, then
    the tenant with the fewest moves under way, then who came first.

    max_under_way: begun and not done.
    """

    def __init__(self, max_under_way: int) -> None:
        self.max_under_way = max_under_way
        self._waiting: dict[str, Entry] = {}
        self._under_way: dict[str, str] = {}  # key -> the tenant it counts for
        self._num_by_tenant: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._under_way

    def is_waiting(self, key: str) -> bool:
        return key in self._waiting

    def is_under_way(self, key: str) -> bool:
        return key in self._under_way

    def add(self, entry: Entry) -> None:
        """Its turn will come; a second time changes nothing."""
        if entry.key not in self:
            self._waiting[entry.key] = entry

    def discard(self, key: str) -> None:
        """Nobody wants it any more; what is under way stays."""
        self._waiting.pop(key, None)

    def start_next(self, may_start: Callable[[Entry], bool]) -> Entry | None:
        """The most urgent one, now under way; None if none waits, may start, or there are enough
        under way.
        """
        if not self._waiting or len(self._under_way) >= self.max_under_way:
            return None
        entry = min(self._waiting.values(), key=self._rank)
        if not may_start(entry):
            return None
        del self._waiting[entry.key]
        self._under_way[entry.key] = entry.claim.tenant_id
        self._num_by_tenant[entry.claim.tenant_id] += 1
        return entry

    def done(self, key: str) -> None:
        tenant_id = self._under_way.pop(key)
        self._num_by_tenant[tenant_id] -= 1
        if not self._num_by_tenant[tenant_id]:
            del self._num_by_tenant[tenant_id]

    def check_integrity(self) -> None:
        assert not self._waiting.keys() & self._under_way.keys()
        assert len(self._under_way) <= self.max_under_way
        assert self._num_by_tenant == Counter(self._under_way.values())

    def _rank(self, entry: Entry) -> tuple[int, int, int]:
        priority, arrival = entry.urgency
        return priority, self._num_by_tenant[entry.claim.tenant_id], arrival
