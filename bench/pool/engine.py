"""A modelled engine: seats, a queue, and an arena that is too small for all adapters.

The product's own `lora.eviction` decides which adapter leaves a full arena. An adapter goes
through the tiers as in `lora.manager`; it keeps its slabs while a request runs with it or waits
for a seat with it.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.pool.clock import Clock
from bench.pool.machine import Machine
from bench.pool.steps import EngineSpec, Row, Steps
from bench.pool.traffic import Adapter
from engine.messages import Tier
from lora.eviction import Claim, EvictionOrder, Key

_SLAB_BYTES = 2 << 20


@dataclass(slots=True)
class Job:
    """A request at an engine. adapter: number of the adapter, None for the base model.

    beginning: key in the prefix cache of the prefix, `shared_tokens` long, of the prompt.
    on_first, on_end: called when the first and the last token are generated.
    """

    number: int
    adapter: int | None
    beginning: tuple[int | None, int]
    shared_tokens: int
    prompt_tokens: int
    output_tokens: int
    on_first: Callable[[], None]
    on_end: Callable[[], None]


@dataclass(slots=True)
class _Entry:
    """An adapter at an engine. num_users: jobs that run or wait for a seat with it.   num_hits:
    jobs that found it in the arena.
    """

    number: int
    adapter: Adapter
    tier: Tier = "remote"
    num_users: int = 0
    num_hits: int = 0
    waiting: list[Job] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.adapter.ref.object_key

    @property
    def num_slabs(self) -> int:
        return -(-self.adapter.ref.size_bytes // _SLAB_BYTES)


class Engine:
    """A modelled engine.

    on_move: called with an adapter's number and tier.   on_copy: called with the bytes of each
    adapter copied into the arena.   cached_tokens: prompt tokens found in the prefix cache so far.
    output_tokens: tokens of requests that have ended.   fetched_*, copied_*: bytes and seconds of
    loads so far, as engine.messages.TierStats counts them.
    """

    def __init__(
        self,
        spec: EngineSpec,
        clock: Clock,
        machine: Machine,
        adapters: Sequence[Adapter],
        on_move: Callable[[int, Tier], None],
        on_copy: Callable[[int], None],
    ) -> None:
        self.spec = spec
        self.cached_tokens = self.output_tokens = 0
        self.fetched_bytes = self.copied_bytes = 0
        self.fetched_s = self.copied_s = 0.0
        self._clock, self._machine, self._adapters = clock, machine, adapters
        self._on_move, self._on_copy = on_move, on_copy
        self._steps = Steps(spec, clock)
        self._entries: dict[int, _Entry] = {}
        self._keys: dict[Key, _Entry] = {}
        self._idle = EvictionOrder()
        self._free_slabs = spec.arena_bytes // _SLAB_BYTES
        self._to_place: deque[_Entry] = deque()
        self._copies_end_s = 0.0
        self._ready: list[tuple[int, Job]] = []  # heap by number
        self._num_loading = 0  # jobs whose adapter is being loaded
        self._prefixes: OrderedDict[tuple[int | None, int], int] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._steps)

    @property
    def waiting(self) -> int:
        return len(self._ready) + self._num_loading

    @property
    def resident(self) -> set[int]:
        """Numbers of the adapters in the arena."""
        return {number for number, entry in self._entries.items() if entry.tier == "device"}

    def submit(self, job: Job) -> None:
        if job.adapter is None:
            self._make_ready(job)
            return
        entry = self._entry(job.adapter)
        if entry.tier == "device":
            self._use(entry)
            entry.num_hits += 1
            self._make_ready(job)
            return
        self._num_loading += 1
        entry.waiting.append(job)
        if len(entry.waiting) == 1:
            self._move(entry, "fetching")
            asked_s = self._clock.now_s
            self._machine.fetch(entry.adapter.ref, partial(self._fetched, entry, asked_s))

    def evict(self, key: Key) -> None:
        """Drop an adapter from the arena; the eviction order calls this."""
        entry = self._keys[key]
        self._free_slabs += entry.num_slabs
        entry.num_hits = 0
        self._move(entry, "disk")

    # ---- adapters ----

    def _entry(self, number: int) -> _Entry:
        if number not in self._entries:
            entry = self._entries[number] = _Entry(number, self._adapters[number])
            self._keys[entry.key] = entry
        return self._entries[number]

    def _move(self, entry: _Entry, tier: Tier) -> None:
        entry.tier = tier
        self._on_move(entry.number, tier)

    def _fetched(self, entry: _Entry, asked_s: float) -> None:
        if self._clock.now_s > asked_s:
            self.fetched_bytes += entry.adapter.ref.size_bytes
            self.fetched_s += self._clock.now_s - asked_s
        self._move(entry, "disk")
        self._to_place.append(entry)
        self._place()

    def _place(self) -> None:
        """Copies adapters for which there is room; adapters that are too large keep waiting."""
        for _ in range(len(self._to_place)):
            entry = self._to_place.popleft()
            missing = max(entry.num_slabs - self._free_slabs, 0)
            if missing > self._idle.num_slabs:
                self._to_place.append(entry)
                continue
            self._idle.evict(missing)
            self._free_slabs -= entry.num_slabs
            self._move(entry, "loading")
            size_bytes = entry.adapter.ref.size_bytes
            start_s = max(self._clock.now_s, self._copies_end_s)
            self._copies_end_s = start_s + size_bytes / self.spec.copy_bytes_per_s
            self.copied_s += self._copies_end_s - self._clock.now_s
            self._clock.at(self._copies_end_s, partial(self._copied, entry))

    def _copied(self, entry: _Entry) -> None:
        self.copied_bytes += entry.adapter.ref.size_bytes
        self._on_copy(entry.adapter.ref.size_bytes)
        self._move(entry, "device")
        jobs, entry.waiting = entry.waiting, []
        self._num_loading -= len(jobs)
        entry.num_users += len(jobs)
        for job in jobs:
            heapq.heappush(self._ready, (job.number, job))
        self._start()

    def _use(self, entry: _Entry) -> None:
        if not entry.num_users:
            self._idle.take(entry.key)
        entry.num_users += 1

    def _leave(self, entry: _Entry) -> None:
        entry.num_users -= 1
        if not entry.num_users:
            self._idle.add(
                self,
                entry.key,
                Claim(entry.adapter.tenant_id),
                num_slabs=entry.num_slabs,
                num_hits=entry.num_hits,
                reload_s=entry.adapter.ref.size_bytes / self.spec.copy_bytes_per_s,
            )
            self._place()

    # ---- requests ----

    def _make_ready(self, job: Job) -> None:
        heapq.heappush(self._ready, (job.number, job))
        self._start()

    def _start(self) -> None:
        """Starts jobs whose adapter is in the arena, first come, first served, on free seats."""
        while self._ready and self.running < self.spec.seats:
            _, job = heapq.heappop(self._ready)
            prompt_tokens = job.prompt_tokens - self._find_prefix(job)
            self._steps.add(
                Row(prompt_tokens, job.output_tokens, job.on_first, partial(self._end, job))
            )

    def _end(self, job: Job) -> None:
        self.output_tokens += job.output_tokens
        if job.adapter is not None:
            self._leave(self._entries[job.adapter])
        job.on_end()
        self._start()

    def _find_prefix(self, job: Job) -> int:
        """Return how many tokens of the job are cached, and cache its prefix from now on."""
        limit = self.spec.prefix_tokens
        if job.shared_tokens > limit:
            return 0
        found = self._prefixes.pop(job.beginning, 0)
        self._prefixes[job.beginning] = job.shared_tokens
        while sum(self._prefixes.values()) > limit:
            self._prefixes.popitem(last=False)
        self.cached_tokens += found
        return found
