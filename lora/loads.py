"""Moves of adapters between tiers: what a loader is asked for and reports, and whose turn it is."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lora.entry import Entry
from lora.errors import Failure
from registry.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loader is through with a stage of the adapter under `key`.

    value: its Packed ("host") or its tables ("device").   was_there: on disk already.
    seconds, size_bytes: what the move took, where there was one.
    used_bytes: of the disk cache, after a "disk".
    """

    key: str
    stage: Literal["disk", "host", "device"]
    value: Any = None
    failure: Failure | None = None
    was_there: bool = False
    seconds: float = 0.0
    size_bytes: int = 0
    used_bytes: int = 0


class Loader(Protocol):
    """Does what takes time. Every call returns at once; `poll` says what has been done since.

    fetch: store to disk; answered by one Loaded "disk", also when dropped.   drop: nobody waits for
    a fetch any more.   load: disk to host.   place: host into slabs of the arena.
    """

    def fetch(self, ref: AdapterRef) -> None: ...
    def drop(self, key: str) -> None: ...
    def load(self, ref: AdapterRef) -> None: ...
    def place(self, ref: AdapterRef, packed: Any, slabs: list[int]) -> None: ...
    def poll(self) -> list[Loaded]: ...


class LoadQueue:
    """Adapters that wait for one kind of move. Who waits for an adapter decides when its turn is:
    the higher class, then the tenant with the fewest moves under way, then who came first.

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
