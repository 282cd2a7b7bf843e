"""What is where: every adapter's tier, who uses it, and who must go. Polled once a step, never
waits.

    REMOTE -> FETCHING -> DISK -> HOST -> LOADING -> DEVICE        any -> FAILED

The manager decides; the loader (a thread, and behind it the fetcher process) does, and reports. An
adapter in use is never evicted; one that fails fails its own requests and is tried again later.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lora.arena import Arena
from lora.errors import Failure
from registry.ref import AdapterRef

Tier = Literal["remote", "fetching", "disk", "host", "loading", "device", "failed"]

Place = tuple[AdapterRef, Tier, int, str | None]
"""(adapter, tier, bytes, error)."""


class Packed(Protocol):
    """An adapter in host memory, packed for the arena."""

    @property
    def num_slabs(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def invocation_tokens(self) -> tuple[int, ...] | None: ...


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


@dataclass(slots=True)
class Entry:
    """One adapter. generation: counts its placements, so that a stale table is never mistaken."""

    ref: AdapterRef
    tier: Tier = "remote"
    users: int = 0
    used_at: int = 0
    generation: int = 0
    packed: Packed | None = None
    packed_bytes: int = 0
    num_slabs: int = 0
    tables: Any = None
    slabs: list[int] = field(default_factory=list)
    copy: int | None = None
    prefetched_by: str | None = None
    failure: Failure | None = None
    retry_at: float = 0.0
    invocation_tokens: tuple[int, ...] | None = None

    @property
    def is_rejected(self) -> bool:
        return self.failure is not None and self.failure.kind != "unavailable"


class AdapterManager:
    """Residency of all adapters of one engine; `entries` is in order of use, oldest first.

    An adapter goes by its object's key, so equal files of two tenants are two adapters here, too:
    what becomes of one tenant's object is nothing to the other.
    host_cache_bytes: packed adapters in host memory, those on their way to the arena included.
    arena_is_host: the arena is host memory (CPU), so a placed adapter keeps no second copy there.
    prefetch_per_tenant: fetches that a tenant may have under way before its requests arrive.
    max_entries: adapters remembered; the oldest idle one is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader,
        *,
        host_cache_bytes: int = 256 << 20,
        arena_is_host: bool = True,
        prefetch_per_tenant: int = 4,
        retry_after_s: float = 5.0,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.loader = loader
        self.host_cache_bytes = host_cache_bytes
        self.arena_is_host = arena_is_host
        self.prefetch_per_tenant = prefetch_per_tenant
        self.retry_after_s = retry_after_s
        self.max_entries = max_entries
        self.clock = clock
        self.entries: dict[str, Entry] = {}
        # The same, in the same order, for what every step asks: in the arena, and in memory.
        self._in_arena: dict[str, Entry] = {}
        self._in_memory: dict[str, Entry] = {}
        self._idle: dict[str, Entry] = {}  # in the arena and used by nobody
        self._num_idle_slabs = 0
        self.num_loads = 0
        self.num_evictions = 0
        self._num_prefetches: Counter[str] = Counter()
        self._moves: list[Place] = []
        arena.keep(self)

    # ---- what requests ask for ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` as far as the host; takes no slabs and evicts nobody."""
        if self._num_prefetches[tenant_id] >= self.prefetch_per_tenant:
            return
        entry = self._touch(ref)
        if self._start(entry):
            entry.prefetched_by = tenant_id
            self._num_prefetches[tenant_id] += 1

    def want(self, ref: AdapterRef) -> None:
        """A request waits for `ref`: join its load, or start it."""
        self._start(self._touch(ref))

    def is_ready(self, key: str) -> bool:
        return self.entries[key].tier == "device"

    def failure(self, key: str) -> Failure | None:
        """Why requests for this adapter cannot be served, while it is not worth another try."""
        entry = self.entries.get(key)
        if entry is None or entry.tier != "failed":
            return None
        return entry.failure

    def acquire(self, key: str) -> None:
        """One more request holds it: it stays in the arena until released."""
        entry = self.entries[key]
        entry.users += 1
        self._note_idle(entry)

    def release(self, key: str) -> None:
        entry = self.entries[key]
        assert entry.users > 0, "released more often than acquired"
        entry.users -= 1
        self._note_idle(entry)

    def slabs_needed(self, key: str) -> int | None:
        """Slabs that placing it takes now; 0 if it is there or coming, None if not packed yet."""
        entry = self.entries[key]
        if entry.tier in ("loading", "device"):
            return 0
        return entry.packed.num_slabs if entry.packed is not None else None

    def place(self, key: str) -> int:
        """Take slabs and start the copy into them; its bytes. The caller made room.

        Raises ArenaFull.
        """
        entry = self.entries[key]
        assert entry.packed is not None
        assert entry.tier == "host"
        entry.num_slabs = entry.packed.num_slabs
        entry.slabs = self.arena.allocate(entry.num_slabs, key)
        entry.copy = self.arena.begin_copy()
        entry.generation += 1
        self._move(entry, "loading")
        self.loader.place(entry.ref, entry.packed, entry.slabs)
        return entry.packed.size_bytes

    def tables(self, key: str) -> tuple[int, Any]:
        """(generation, device tables) of an adapter in the arena."""
        entry = self.entries[key]
        assert entry.tier == "device"
        return entry.generation, entry.tables

    def invocation_tokens(self, key: str) -> tuple[int, ...] | None:
        """From which prompt tokens on it applies (aLoRA), once it was in host memory; None: all."""
        return self.entries[key].invocation_tokens

    # ---- who must go ----

    def num_idle_slabs(self) -> int:
        """See lora.arena.Idle, as the next two."""
        return self._num_idle_slabs

    def coldest(self) -> int | None:
        return next((entry.used_at for entry in self._idle.values()), None)

    def evict_coldest(self) -> None:
        self._evict(next(iter(self._idle.values())))

    # ---- once a step ----

    def poll(self) -> None:
        """Take in what the loader has done since the last step."""
        for done in self.loader.poll():
            entry = self.entries[done.key]
            if done.failure is not None:
                self._fail(entry, done.failure)
            elif done.stage == "disk":
                self._move(entry, "disk")
                self.loader.load(entry.ref)
            elif done.stage == "host":
                entry.packed, entry.packed_bytes = done.value, done.value.size_bytes
                entry.invocation_tokens = done.value.invocation_tokens
                self._move(entry, "host")
                self._trim_host()
            else:
                self._finish_copy(entry)
                entry.tables = done.value
                self.num_loads += 1
                if self.arena_is_host:
                    entry.packed = None
                self._move(entry, "device")

    def places(self) -> list[Place]:
        """Where every adapter is now."""
        return [self._place_of(entry) for entry in self.entries.values()]

    def take_moves(self) -> list[Place]:
        """Every move since the last call, oldest first."""
        moves, self._moves = self._moves, []
        return moves

    def num_slabs_used(self) -> int:
        return sum(len(e.slabs) for e in self._in_arena.values())

    def check_integrity(self) -> None:
        for key, entry in self.entries.items():
            assert entry.ref.object_key == key
            assert entry.users >= 0
            assert bool(entry.slabs) == (entry.tier in ("loading", "device"))
            assert self.arena.owned_by(key) == len(entry.slabs)
            assert (key in self._in_arena) == bool(entry.slabs)
            assert (key in self._in_memory) == (entry.packed is not None)
            assert (key in self._idle) == (entry.tier == "device" and entry.users == 0)
        idle = list(self._idle.values())
        assert [e.used_at for e in idle] == sorted(e.used_at for e in idle)
        assert self._num_idle_slabs == sum(len(e.slabs) for e in idle)

    # ---- inside ----

    def _touch(self, ref: AdapterRef) -> Entry:
        """The entry of `ref`, now the most recently used."""
        key = ref.object_key
        entry = self.entries.pop(key, None) or Entry(ref)
        self.entries[key] = entry
        entry.used_at = self.arena.tick()
        for place in (self._in_arena, self._in_memory, self._idle):
            if place.pop(key, None):
                place[key] = entry
        if len(self.entries) > self.max_entries:
            self._forget_oldest()
        return entry

    def _start(self, entry: Entry) -> bool:
        """Begin to fetch it, if that is what it needs; whether it was."""
        if entry.tier == "failed" and not entry.is_rejected and self.clock() >= entry.retry_at:
            self._move(entry, "remote")
        if entry.tier != "remote":
            return False
        entry.failure = None
        self._move(entry, "fetching")
        self.loader.fetch(entry.ref)
        return True

    def _fail(self, entry: Entry, failure: Failure) -> None:
        self._finish_copy(entry)
        if entry.slabs:
            self.arena.retire(entry.slabs)
        entry.slabs, entry.packed = [], None
        entry.failure = failure
        entry.retry_at = self.clock() + self.retry_after_s
        self._move(entry, "failed")

    def _evict(self, entry: Entry) -> None:
        self.arena.retire(entry.slabs)
        entry.slabs, entry.tables = [], None
        self.num_evictions += 1
        self._move(entry, "host" if entry.packed is not None else "remote")

    def _trim_host(self) -> None:
        """Drop idle packed adapters, oldest first, down to the host cache's bytes."""
        kept = list(self._in_memory.values())
        size_bytes = sum(e.packed.size_bytes for e in kept if e.packed is not None)
        for entry in kept[:-1]:  # the newest was loaded because somebody asked for it
            if size_bytes <= self.host_cache_bytes:
                break
            if entry.users == 0 and entry.packed is not None and entry.tier in ("host", "device"):
                size_bytes -= entry.packed.size_bytes
                entry.packed = None
                self._move(entry, "remote" if entry.tier == "host" else "device")

    def _forget_oldest(self) -> None:
        for key, entry in self.entries.items():
            if entry.users == 0 and entry.tier in ("remote", "failed"):
                del self.entries[key]
                return

    def _finish_copy(self, entry: Entry) -> None:
        if entry.copy is not None:
            self.arena.finish_copy(entry.copy)
            entry.copy = None

    def _move(self, entry: Entry, tier: Tier) -> None:
        entry.tier = tier
        self._moves.append(self._place_of(entry))
        _list(self._in_arena, entry, bool(entry.slabs))
        _list(self._in_memory, entry, entry.packed is not None)
        self._note_idle(entry)
        if entry.prefetched_by is not None and tier not in ("fetching", "disk"):
            self._num_prefetches[entry.prefetched_by] -= 1
            if not self._num_prefetches[entry.prefetched_by]:
                del self._num_prefetches[entry.prefetched_by]
            entry.prefetched_by = None

    def _note_idle(self, entry: Entry) -> None:
        """Keep `_idle` and its slabs right after any change of tier or users."""
        key = entry.ref.object_key
        is_idle = entry.tier == "device" and entry.users == 0
        if is_idle and key not in self._idle:
            self._idle[key] = entry
            entry.used_at = self.arena.tick()
            self._num_idle_slabs += entry.num_slabs
        elif not is_idle and key in self._idle:
            del self._idle[key]
            self._num_idle_slabs -= entry.num_slabs

    @staticmethod
    def _place_of(entry: Entry) -> Place:
        size_bytes = entry.packed_bytes or entry.ref.size_bytes
        return entry.ref, entry.tier, size_bytes, entry.failure.error if entry.failure else None


def _list(place: dict[str, Entry], entry: Entry, belongs: bool) -> None:
    """Put an entry where it belongs, as the most recently used, or take it away."""
    if belongs:
        place.setdefault(entry.ref.object_key, entry)
    else:
        place.pop(entry.ref.object_key, None)
