"""A modelled machine: the disk cache that its engines share, and the downloads from the store."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.pool.clock import Clock
from registry.ref import AdapterRef


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """store_*: latency and bandwidth of one download; at most `max_fetches` run, others wait."""

    engines: int = 5
    disk_bytes: int = 30 << 30
    store_delay_s: float = 0.1
    store_bytes_per_s: float = 4e8
    max_fetches: int = 8

    def fetch_s(self, size_bytes: float) -> float:
        return self.store_delay_s + size_bytes / self.store_bytes_per_s


class Machine:
    """Evicts the least recently used adapter, as lora.disk_cache does.   on_fetch: called with the
    bytes of each download.
    """

    def __init__(self, spec: MachineSpec, clock: Clock, on_fetch: Callable[[int], None]) -> None:
        self._spec = spec
        self._clock = clock
        self._on_fetch = on_fetch
        self._disk: OrderedDict[str, int] = OrderedDict()
        self._disk_used_bytes = 0
        self._waiters: dict[str, list[Callable[[], None]]] = {}
        self._queue: deque[AdapterRef] = deque()
        self._num_under_way = 0

    def fetch(self, ref: AdapterRef, then: Callable[[], None]) -> None:
        """Bring an adapter onto disk, then call `then`. Engines share a download under way."""
        if ref.object_key in self._disk:
            self._disk.move_to_end(ref.object_key)
            then()
        elif ref.object_key in self._waiters:
            self._waiters[ref.object_key].append(then)
        else:
            self._waiters[ref.object_key] = [then]
            self._queue.append(ref)
            self._start_fetches()

    def _start_fetches(self) -> None:
        while self._queue and self._num_under_way < self._spec.max_fetches:
            ref = self._queue.popleft()
            self._num_under_way += 1
            self._clock.after(self._spec.fetch_s(ref.size_bytes), partial(self._keep, ref))

    def _keep(self, ref: AdapterRef) -> None:
        self._num_under_way -= 1
        self._on_fetch(ref.size_bytes)
        self._disk[ref.object_key] = ref.size_bytes
        self._disk_used_bytes += ref.size_bytes
        while self._disk_used_bytes > self._spec.disk_bytes and len(self._disk) > 1:
            _, size_bytes = self._disk.popitem(last=False)
            self._disk_used_bytes -= size_bytes
        for then in self._waiters.pop(ref.object_key):
            then()
        self._start_fetches()
