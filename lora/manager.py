"""What is where: every adapter's tier, who wants it, who uses it. Polled once a step, never waits.

    REMOTE -> FETCHING -> DISK -> HOST -> LOADING -> DEVICE        any -> FAILED

The manager decides; the loader (threads, and behind them the fetcher process) does, and reports. An
adapter in use is never evicted; one that fails fails its own requests, and is tried again later
where that can help.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lora.arena import Arena
from lora.entry import Entry, Packed, Tier, Waiter
from lora.errors import Failure, FailureKind
from lora.eviction import EVERYBODY, Claim, Key
from lora.host_cache import HostCache
from lora.loads import Loaded, Loader, LoadQueue
from lora.residency_meter import ResidencyMeter
from lora.tier_counts import TierCounts
from registry.ref import AdapterRef

Place = tuple[AdapterRef, Tier, int, str | None]
"""(adapter, tier, bytes, error)."""

_MAX_READS = 2
"""Given to the loader at once: one is read, the next is ready, and the others stay in order."""
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_NEVER = float("inf")
_MOST_LOST: dict[FailureKind, int] = {"lost": 1, "evicted": 8}
"""In a row: then something is wrong with the disk, or its cache is far too small."""


class AdapterManager:
    """Residency of all adapters of one engine; `entries` is in order of use, oldest first.

    An adapter goes by its object's key, so equal files of two tenants are two adapters here, too:
    what becomes of one tenant's object is nothing to the other.
    host_cache_bytes: packed adapters in host memory, those on their way to the arena included.
    disk_cache_bytes: the fetcher's quota, for the figures.
    arena_is_host: the arena is host memory (CPU), and an adapter is nowhere else in it.
    max_fetches: under way at the fetcher.   prefetch_per_tenant: wanted by nothing but a prefetch.
    max_pinned_share: of the arena's slabs.
    max_entries: adapters remembered; the oldest that nobody wants is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader,
        *,
        host_cache_bytes: int = 256 << 20,
        disk_cache_bytes: int = 0,
        arena_is_host: bool = True,
        max_fetches: int = 8,
        prefetch_per_tenant: int = 4,
        max_pinned_share: float = 0.5,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.loader = loader
        self.arena_is_host = arena_is_host
        self.prefetch_per_tenant = prefetch_per_tenant
        self.max_pinned_slabs = int(max_pinned_share * arena.num_slabs)
        self.max_entries = max_entries
        self.clock = clock
        self.entries: dict[str, Entry] = {}
        self.counts = TierCounts(0 if arena_is_host else host_cache_bytes, disk_cache_bytes)
        self.residency = ResidencyMeter(clock)
        self.num_evictions = 0
        self._host = HostCache(host_cache_bytes, self._left_host)
        self._fetches = LoadQueue(max_fetches)
        self._reads = LoadQueue(_MAX_READS)
        self._num_prefetches: Counter[str] = Counter()
        self._pinned: dict[str, Entry] = {}  # asked for; those that fit are `is_pinned`
        self._num_slabs = 0
        self._moves: list[Place] = []

    # ---- what requests ask for ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` to the tier before the arena; takes no slabs and evicts nobody else's."""
        if self._num_prefetches[tenant_id] >= self.prefetch_per_tenant:
            return
        entry = self._touch(ref, tenant_id)
        is_far = entry.tier in ("remote", "disk") or self._may_try_again(entry)
        if is_far and not entry.is_wanted:
            entry.prefetched_by = tenant_id
            self._num_prefetches[tenant_id] += 1
            if self.arena_is_host and entry.tier == "disk" and entry.key not in self._reads:
                self._move(entry, "remote")  # it may be there no more: the fetcher looks
            self._advance(entry)

    def join(self, ref: AdapterRef, waiter: Waiter) -> None:
        """A request needs `ref` from now on, until it leaves: join its load, or start it."""
        entry = self._touch(ref, waiter.tenant_id)
        entry.claim = Claim(waiter.tenant_id, waiter.weight)
        self.counts.asked(entry)
        if entry.tier == "device":
            entry.num_hits += 1
        entry.waiters[waiter.request_id] = waiter
        self._end_prefetch(entry)
        self._advance(entry)
        self._fetches.hasten(entry, waiter)
        self._reads.hasten(entry, waiter)

    def leave(self, key: str, request_id: str) -> None:
        """That request has ended. A load that nobody waits for any more is dropped."""
        entry = self.entries[key]
        del entry.waiters[request_id]
        self._drop_if_unwanted(entry)

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Keep exactly these in the arena, as far as `max_pinned_slabs` goes, first come first."""
        before, self._pinned = self._pinned, {}
        for ref in refs:
            entry = self._pinned[ref.object_key] = self._touch(ref, EVERYBODY)
            self._set_pinned(entry, True)
        for key in before.keys() - self._pinned.keys():
            self._set_pinned(before[key], False)
            self._drop_if_unwanted(before[key])
        self._keep_pinned()

    def wait(self, key: str) -> Failure | None:
        """Go on with its load, if it needs a push; or why it cannot be had at present."""
        entry = self.entries[key]
        self._advance(entry)
        return entry.failure if entry.tier == "failed" else None

    def retry_after_s(self, key: str) -> float:
        """When it is worth to ask again for what could not be had."""
        return max(_FIRST_RETRY_S, self.entries[key].retry_at - self.clock())

    def is_ready(self, key: str) -> bool:
        return self.entries[key].tier == "device"

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
        entry.slabs = self.arena.allocate(entry.packed.num_slabs, key)
        self._num_slabs += len(entry.slabs)
        entry.generation += 1
        entry.num_hits = 0
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

    # ---- once a step ----

    def poll(self) -> None:
        """Take in what the loader has done since the last step, and give it more."""
        for done in self.loader.poll():
            entry = self.entries[done.key]
            match done.stage:
                case "disk":
                    self._fetched(entry, done)
                case "host":
                    self._read(entry, done)
                case "device":
                    self._placed(entry, done)
        self._keep_pinned()
        while entry_to_fetch := self._fetches.start_next(lambda entry: True):
            self._move(entry_to_fetch, "fetching")
            self.loader.fetch(entry_to_fetch.ref)
        while entry_to_read := self._reads.start_next(self._host_expects):
            self.loader.load(entry_to_read.ref)

    def places(self) -> list[Place]:
        """Where every adapter is now."""
        return [self._place_of(entry) for entry in self.entries.values()]

    def take_moves(self) -> list[Place]:
        """Every move since the last call, oldest first."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def num_slabs_used(self) -> int:
        return self._num_slabs

    @property
    def num_slabs_pinned(self) -> int:
        return sum(len(entry.slabs) for entry in self._pinned.values() if entry.is_pinned)

    @property
    def host_bytes(self) -> int:
        return self._host.used_bytes

    def check_integrity(self) -> None:
        assert self._num_slabs == sum(len(entry.slabs) for entry in self.entries.values())
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.users >= 0
            assert bool(entry.slabs) == (entry.tier in ("loading", "device"))
            assert bool(entry.slabs) or entry.users <= len(entry.waiters), "in use, and not there"
            assert self.arena.owned_by(key) == len(entry.slabs)
            assert entry.packed is not None or entry.tier not in ("host", "loading")
            assert (key in self.arena.idle) == entry.is_idle
            assert self._fetches.is_under_way(key) == (entry.tier == "fetching")
            assert entry.is_wanted or not self._fetches.is_waiting(key)
        self._host.check_integrity()
        self._fetches.check_integrity()
        self._reads.check_integrity()
        prefetchers = (e.prefetched_by for e in self.entries.values() if e.prefetched_by)
        assert self._num_prefetches == Counter(prefetchers)
        assert self.num_slabs_pinned <= self.max_pinned_slabs

    # ---- towards the arena ----

    def _advance(self, entry: Entry) -> None:
        """See to it that its next move is under way or in line."""
        if self._may_try_again(entry):
            self._move(entry, "remote")
        if entry.tier == "remote":
            self._fetches.add(entry)
        elif entry.tier == "disk":
            self._reads.add(entry)

    def _drop_if_unwanted(self, entry: Entry) -> None:
        if entry.is_wanted:
            return
        self._fetches.discard(entry.key)
        self._reads.discard(entry.key)
        if self._fetches.is_under_way(entry.key):
            self.loader.drop(entry.key)
        if self.arena_is_host and entry.tier == "host":
            self._host.drop(entry)  # it would only say where a file was

    def _host_expects(self, entry: Entry) -> bool:
        """Whether it may be read now. To an arena in host memory it goes straight from its file."""
        return self._host.expect(entry, 0 if self.arena_is_host else entry.host_bytes)

    def _may_try_again(self, entry: Entry) -> bool:
        return entry.tier == "failed" and self.clock() >= entry.retry_at

    def _fetched(self, entry: Entry, done: Loaded) -> None:
        self._fetches.done(entry.key)
        self.counts.disk.used_bytes = done.used_bytes or self.counts.disk.used_bytes
        if done.failure is None:
            self.counts.fetched(entry, done.seconds, done.size_bytes, was_there=done.was_there)
            entry.host_bytes = done.host_bytes
            if not self.arena_is_host and done.host_bytes > self._host.limit_bytes:
                self._fail(entry, _too_large(done.host_bytes, self._host.limit_bytes))
                return
            self._move(entry, "disk")
        elif done.failure.kind == "dropped":
            self._move(entry, "remote")
        else:
            self.counts.store.misses += done.failure.kind == "missing"
            self._fail(entry, done.failure)
            return
        if self.arena_is_host:
            self._end_prefetch(entry)  # from here it goes straight into the arena
        if entry.is_wanted:
            self._advance(entry)

    def _read(self, entry: Entry, done: Loaded) -> None:
        self._reads.done(entry.key)
        if done.failure is None:
            packed: Packed = done.value
            assert packed.digest == entry.ref.digest, "another adapter was read"
            entry.packed = packed
            entry.packed_bytes, entry.num_slabs = packed.size_bytes, packed.num_slabs
            entry.invocation_tokens = packed.invocation_tokens
            self.counts.moved("host", entry, done.seconds, done.size_bytes)
            self._move(entry, "host")
        else:
            self._lose(entry, done.failure)
        self._host.arrived(entry)
        self._end_prefetch(entry)
        if entry.is_wanted and entry.tier == "remote":
            self._advance(entry)

    def _placed(self, entry: Entry, done: Loaded) -> None:
        if done.failure is not None:
            self._lose(entry, done.failure)
            return
        self.counts.moved("device", entry, done.seconds, done.size_bytes)
        entry.failure, entry.num_failures, entry.num_lost = None, 0, 0
        entry.tables = done.value
        if self.arena_is_host:
            self._host.drop(entry)
        self._move(entry, "device")

    def _keep_pinned(self) -> None:
        """Bring in what is pinned and not there, as far as it may be."""
        left = self.max_pinned_slabs
        for key, entry in self._pinned.items():
            num_slabs = entry.num_slabs
            self._set_pinned(entry, num_slabs <= left)
            if not entry.is_pinned:
                self._drop_if_unwanted(entry)
                continue
            left -= num_slabs
            self.wait(key)
            if entry.tier == "host" and self.arena.make_room(num_slabs):
                self.place(key)

    # ---- away from it ----

    def evict(self, key: Key) -> None:
        """See lora.eviction.Source."""
        entry = self.entries[str(key)]
        self._leave_arena(entry)
        self.num_evictions += 1
        self._move(entry, "host" if entry.packed is not None else "remote")

    def _lose(self, entry: Entry, failure: Failure) -> None:
        """What was on disk could not be used: fetch it again, if that can help."""
        if entry.num_lost >= _MOST_LOST.get(failure.kind, 0):
            self._fail(entry, failure)
            return
        if entry.slabs:
            self._leave_arena(entry)
        entry.num_lost += 1
        self._move(entry, "remote")
        self._host.drop(entry)

    def _fail(self, entry: Entry, failure: Failure) -> None:
        if entry.slabs:
            self._leave_arena(entry)
        entry.failure = failure
        entry.num_failures += 1
        entry.num_lost = 0
        entry.retry_at = self.clock() + _retry_s(failure.kind, entry.num_failures)
        self._move(entry, "failed")
        self._end_prefetch(entry)
        self._host.drop(entry)

    def _leave_arena(self, entry: Entry) -> None:
        self.arena.retire(entry.slabs)
        self._num_slabs -= len(entry.slabs)
        entry.slabs, entry.tables = [], None
        self.arena.idle.adapter_left(entry.key)

    def _left_host(self, entry: Entry, packed: Packed) -> None:
        """The host cache dropped its copy."""
        self.loader.release(packed)
        if entry.tier == "host":
            self._move(entry, "remote")

    # ---- bookkeeping ----

    def _touch(self, ref: AdapterRef, tenant_id: str) -> Entry:
        """The entry of `ref`, now the most recently used; a new one is kept for this tenant."""
        entry = self.entries.pop(ref.object_key, None)
        if entry is None:
            entry = Entry(ref, Claim(tenant_id))
            if len(self.entries) >= self.max_entries:
                self._forget_oldest()
        self.entries[entry.key] = entry
        self._host.touch(entry)
        return entry

    def _forget_oldest(self) -> None:
        for key, entry in self.entries.items():
            if not entry.is_wanted and entry.tier in ("remote", "disk", "failed"):
                if key in self._reads or key in self._fetches:
                    continue
                del self.entries[key]
                self.residency.forget(key)
                return

    def _end_prefetch(self, entry: Entry) -> None:
        """It has come, or failed, or a request wants it now."""
        if (tenant_id := entry.prefetched_by) is not None:
            entry.prefetched_by = None
            self._num_prefetches[tenant_id] -= 1
            if not self._num_prefetches[tenant_id]:
                del self._num_prefetches[tenant_id]

    def _move(self, entry: Entry, tier: Tier) -> None:
        entry.tier = tier
        self._moves.append(self._place_of(entry))
        self.residency.note(entry)
        self._note_idle(entry)

    def _set_pinned(self, entry: Entry, is_pinned: bool) -> None:
        if entry.is_pinned != is_pinned:
            entry.is_pinned = is_pinned
            self.residency.note(entry)
            self._note_idle(entry)

    def _note_idle(self, entry: Entry) -> None:
        """Keep the arena's order right after any change of tier, users or pins."""
        is_known = entry.key in self.arena.idle
        if entry.is_idle and not is_known:
            reload_s = self.counts.reload_s(entry)
            self.arena.idle.add(
                self,
                entry.key,
                entry.claim,
                num_slabs=len(entry.slabs),
                num_hits=entry.num_hits,
                reload_s=reload_s,
            )
        elif not entry.is_idle and is_known:
            self.arena.idle.take(entry.key)

    @staticmethod
    def _place_of(entry: Entry) -> Place:
        size_bytes = entry.packed_bytes or entry.ref.size_bytes
        error = entry.failure.error if entry.failure and entry.tier == "failed" else None
        return entry.ref, entry.tier, size_bytes, error


def _too_large(host_bytes: int, limit_bytes: int) -> Failure:
    return Failure(
        "too_large",
        f"it takes {host_bytes} bytes of host memory on its way to the device, of "
        f"{limit_bytes}: set host_cache_bytes to {host_bytes} at least",
    )


def _retry_s(kind: FailureKind, num_failures: int) -> float:
    """How long requests for it fail at once, before it is tried again.

    What is missing or damaged may have been uploaded again; what does not fit never will.
    """
    if kind in ("incompatible", "too_large"):
        return _NEVER
    return float(min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S))
