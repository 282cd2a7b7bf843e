"""Moves of adapters between tiers: what a loader is asked for and reports, and whose turn it is."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lora.entry import Entry, Urgency, Waiter
from lora.errors import Failure
from registry.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loader is through with a stage of the adapter under `key`.

    value: its Packed ("host") or its tables ("device").   was_there: on disk already.
    seconds, size_bytes: what the move took, where there was one.
    used_bytes: of the disk cache, after a "disk".   host_bytes: that it takes in host memory
    outside the arena, after a "disk".
    """

    key: str
    stage: Literal["disk", "host", "device"]
    value: Any = None
    failure: Failure | None = None
    was_there: bool = False
    seconds: float = 0.0
    size_bytes: int = 0
    used_bytes: int = 0
    host_bytes: int = 0


class Loader(Protocol):
    """Does what takes time. Every call returns at once; `poll` says what has been done since.

    fetch: store to disk; answered by one Loaded "disk", also when dropped.   drop: nobody waits for
    a fetch any more.   load: make ready what is on disk, in host memory where the arena is not.
    place: into slabs of the arena.   release: what was loaded is needed in host memory no more.
    """

    def fetch(self, ref: AdapterRef) -> None: ...
    def drop(self, key: str) -> None: ...
    def load(self, ref: AdapterRef) -> None: ...
    def place(self, ref: AdapterRef, packed: Any, slabs: list[int]) -> None: ...
    def release(self, packed: Any) -> None: ...
    def poll(self) -> list[Loaded]: ...


_MOST_STALE = 64


@dataclass(slots=True)
class _Place:
    """Where an adapter stands in line: whose, and how urgent it was when it was last looked at."""

    entry: Entry
    tenant_id: str
    urgency: Urgency


class LoadQueue:
    """Adapters that wait for one kind of move. Who waits for an adapter decides when its turn is:
    the higher class, then the tenant with the fewest moves under way, then who came first.

    max_under_way: begun and not done.
    """

    def __init__(self, max_under_way: int) -> None:
        self.max_under_way = max_under_way
        self._waiting: dict[str, _Place] = {}
        # By tenant, a heap of (urgency, key); what is no adapter's place any more is skipped.
        self._lines: dict[str, list[tuple[Urgency, str]]] = {}
        self._under_way: dict[str, str] = {}  # key -> the tenant it counts for
        self._num_by_tenant: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._under_way

    def is_waiting(self, key: str) -> bool:
        return key in self._waiting

    def is_under_way(self, key: str) -> bool:
        return key in self._under_way

    def add(self, entry: Entry) -> None:
        """Its turn will come. A second time changes nothing."""
        if entry.key not in self:
            self._stand(entry, entry.urgency)

    def hasten(self, entry: Entry, waiter: Waiter) -> None:
        """One more waits for it: for another tenant perhaps, or more urgently."""
        if (place := self._waiting.get(entry.key)) is not None:
            urgency = min(place.urgency, waiter.urgency)
            if (urgency, entry.claim.tenant_id) != (place.urgency, place.tenant_id):
                self._stand(entry, urgency)

    def discard(self, key: str) -> None:
        """Nobody wants it any more; what is under way stays."""
        self._waiting.pop(key, None)

    def start_next(self, may_start: Callable[[Entry], bool]) -> Entry | None:
        """The most urgent one, now under way; None if none waits, may start, or there are enough
        under way.
        """
        if len(self._under_way) >= self.max_under_way:
            return None
        place = min(self._heads(), key=self._rank, default=None)
        if place is None or not may_start(place.entry):
            return None
        del self._waiting[place.entry.key]
        self._under_way[place.entry.key] = place.tenant_id
        self._num_by_tenant[place.tenant_id] += 1
        return place.entry

    def done(self, key: str) -> None:
        tenant_id = self._under_way.pop(key)
        self._num_by_tenant[tenant_id] -= 1
        if not self._num_by_tenant[tenant_id]:
            del self._num_by_tenant[tenant_id]

    def check_integrity(self) -> None:
        assert not self._waiting.keys() & self._under_way.keys()
        assert len(self._under_way) <= self.max_under_way
        assert self._num_by_tenant == Counter(self._under_way.values())
        for key, place in self._waiting.items():
            assert (place.urgency, key) in self._lines[place.tenant_id], "it stands nowhere"

    def _stand(self, entry: Entry, urgency: Urgency) -> None:
        place = self._waiting[entry.key] = _Place(entry, entry.claim.tenant_id, urgency)
        line = self._lines.setdefault(place.tenant_id, [])
        heapq.heappush(line, (urgency, entry.key))
        if len(line) > 2 * len(self._waiting) + _MOST_STALE:
            line[:] = [stand for stand in line if self._is_place(place.tenant_id, *stand)]
            heapq.heapify(line)

    def _is_place(self, tenant_id: str, urgency: Urgency, key: str) -> bool:
        place = self._waiting.get(key)
        return place is not None and (place.tenant_id, place.urgency) == (tenant_id, urgency)

    def _heads(self) -> list[_Place]:
        """The first of every tenant's line."""
        heads = []
        for tenant_id in list(self._lines):
            if (head := self._head(tenant_id)) is not None:
                heads.append(head)
            else:
                del self._lines[tenant_id]
        return heads

    def _head(self, tenant_id: str) -> _Place | None:
        line = self._lines[tenant_id]
        while line:
            urgency, key = line[0]
            if not self._is_place(tenant_id, urgency, key):
                heapq.heappop(line)
                continue
            place = self._waiting[key]
            if (now := place.entry.urgency) == urgency:
                return place
            place.urgency = now  # who was first has left
            heapq.heapreplace(line, (now, key))
        return None

    def _rank(self, place: _Place) -> tuple[int, int, int]:
        priority, arrival = place.urgency
        return priority, self._num_by_tenant[place.tenant_id], arrival
