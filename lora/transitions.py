"""Moves of adapters from tier to tier: the loader's work, and the reactions to its reports.

REMOTE -> FETCHING -> DISK -> HOST -> LOADING -> DEVICE        any -> FAILED
"""

from typing import Generic

from lora.arena import Arena
from lora.entry import Entry, Packed, Waiter
from lora.errors import Failure
from lora.eviction import Key
from lora.host_cache import HostCache
from lora.load_queue import LoadQueue
from lora.loads import Fetched, Loaded, Loader, Placed, Read, TablesT_co
from lora.prefetches import Prefetches
from lora.residency_meter import ResidencyMeter
from lora.retries import Retries
from lora.tier_counts import TierCounts
from lora.tier_map import TierMap
from registry.ref import AdapterRef

_MAX_READS = 2
"""Reads given to the loader at once, one running and one next; the others wait in `_reads`."""


class Transitions(Generic[TablesT_co]):
    """Moves adapters towards the arena and away from it. AdapterManager documents the arguments.

    tables: (generation, tables) of every adapter in the arena, by key.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader[TablesT_co],
        counts: TierCounts,
        meter: ResidencyMeter,
        retries: Retries,
        prefetches: Prefetches,
        *,
        host_cache_bytes: int,
        arena_is_host: bool,
        max_fetches: int,
        max_entries: int,
    ) -> None:
        self.loader = loader
        self.arena_is_host = arena_is_host
        self.tiers = TierMap(arena, counts, meter, self, max_entries)
        self.host = HostCache(host_cache_bytes, self._left_host)
        self.tables: dict[str, tuple[int, TablesT_co]] = {}
        self.num_evictions = 0
        self._counts = counts
        self._retries = retries
        self._prefetches = prefetches
        self._fetches = LoadQueue(max_fetches)
        self._reads = LoadQueue(_MAX_READS)

    def touch(self, ref: AdapterRef, tenant_id: str) -> Entry:
        """The entry of `ref`, now the most recently used; a new entry is kept for this tenant."""
        entry = self.tiers.touch(ref, tenant_id, self._is_in_no_line)
        self.host.touch(entry)
        return entry

    # ---- towards the arena ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` to the tier before the arena, unless this tenant has enough under way."""
        if not self._prefetches.may_begin(tenant_id):
            return
        entry = self.touch(ref, tenant_id)
        is_far = entry.tier in ("remote", "disk") or self._retries.may_try_again(entry)
        if is_far and not entry.is_wanted:
            self._prefetches.begin(entry, tenant_id)
            if self.arena_is_host and entry.tier == "disk" and entry.key not in self._reads:
                self.tiers.move(entry, "remote")  # the fetcher checks that the file still exists
            self.advance(entry)

    def hasten(self, entry: Entry, waiter: Waiter) -> None:
        """Start or join the adapter's load for one more request that waits."""
        self._prefetches.end(entry)
        self.advance(entry)
        self._fetches.hasten(entry, waiter)
        self._reads.hasten(entry, waiter)

    def advance(self, entry: Entry) -> None:
        """Queue the adapter's next move, unless it is queued or under way."""
        if self._retries.may_try_again(entry):
            self.tiers.move(entry, "remote")
        if entry.tier == "remote":
            self._fetches.add(entry)
        elif entry.tier == "disk":
            self._reads.add(entry)

    def place(self, entry: Entry) -> int:
        """Take slabs and start the copy into them; returns its bytes. Raises ArenaFull."""
        assert entry.packed is not None
        assert entry.tier == "host"
        self.tiers.take_slabs(entry, entry.packed.num_slabs)
        self.tiers.move(entry, "loading")
        self.loader.place(entry.ref, entry.packed, entry.slabs)
        return entry.packed.size_bytes

    def start_next(self) -> None:
        """Give the loader more work, in the order of the queues."""
        while entry_to_fetch := self._fetches.start_next(lambda entry: True):
            self.tiers.move(entry_to_fetch, "fetching")
            self.loader.fetch(entry_to_fetch.ref)
        while entry_to_read := self._reads.start_next(self._host_expects):
            self.loader.load(entry_to_read.ref)

    def take_in(self, done: Loaded[TablesT_co]) -> None:
        """Process one report of the loader."""
        entry = self.tiers.entries[done.key]
        match done:
            case Fetched():
                self._fetched(entry, done)
            case Read():
                self._read(entry, done)
            case Placed():
                self._placed(entry, done)

    def _fetched(self, entry: Entry, done: Fetched) -> None:
        self._fetches.done(entry.key)
        self._counts.disk.used_bytes = done.used_bytes or self._counts.disk.used_bytes
        if done.failure is None:
            self._counts.fetched(entry, done.seconds, done.size_bytes, was_there=done.was_there)
            entry.was_on_disk, entry.host_bytes = done.was_there, done.host_bytes
            if not self.arena_is_host and done.host_bytes > self.host.limit_bytes:
                self._fail(entry, _too_large(done.host_bytes, self.host.limit_bytes))
                return
            self.tiers.move(entry, "disk")
        elif done.failure.kind == "dropped":
            self.tiers.move(entry, "remote")
        else:
            self._counts.store.misses += done.failure.kind == "missing"
            self._fail(entry, done.failure)
            return
        if self.arena_is_host:
            self._prefetches.end(entry)  # the disk is the last tier before the arena
        if entry.is_wanted:
            self.advance(entry)

    def _read(self, entry: Entry, done: Read) -> None:
        self._reads.done(entry.key)
        if isinstance(done.outcome, Failure):
            self._lose(entry, done.outcome)
        else:
            packed = done.outcome
            assert packed.digest == entry.ref.digest, "another adapter was read"
            entry.packed = packed
            entry.packed_bytes, entry.num_slabs = packed.size_bytes, packed.num_slabs
            entry.invocation_tokens = packed.invocation_tokens
            self._counts.moved("host", entry, done.seconds, done.size_bytes)
            self.tiers.move(entry, "host")
        self.host.arrived(entry)
        self._prefetches.end(entry)
        if entry.is_wanted and entry.tier == "remote":
            self.advance(entry)

    def _placed(self, entry: Entry, done: Placed[TablesT_co]) -> None:
        if isinstance(done.outcome, Failure):
            self._lose(entry, done.outcome)
            return
        self._counts.moved("device", entry, done.seconds, done.size_bytes)
        self._retries.forgive(entry)
        self.tables[entry.key] = entry.generation, done.outcome
        if self.arena_is_host:
            self.host.drop(entry)
        self.tiers.move(entry, "device")

    # ---- away from the arena ----

    def drop_if_unwanted(self, entry: Entry) -> None:
        """Drop the load of an adapter that nothing wants any more."""
        if entry.is_wanted:
            return
        self._fetches.discard(entry.key)
        self._reads.discard(entry.key)
        if self._fetches.is_under_way(entry.key):
            self.loader.drop(entry.key)
        if self.arena_is_host and entry.tier == "host":
            self.host.drop(entry)  # the copy is only a header, whose file may be evicted

    def evict(self, key: Key) -> None:
        """Implement lora.eviction.Source."""
        entry = self.tiers.entries[str(key)]
        self._leave_arena(entry)
        self.num_evictions += 1
        self.tiers.move(entry, "host" if entry.packed is not None else "remote")

    def _lose(self, entry: Entry, failure: Failure) -> None:
        """Handle a packed file that could not be used: fetch it again if that can help."""
        if not self._retries.may_fetch_again(entry, failure):
            self._fail(entry, failure)
            return
        self._leave_arena(entry)
        entry.num_lost += 1
        self.tiers.move(entry, "remote")
        self.host.drop(entry)

    def _fail(self, entry: Entry, failure: Failure) -> None:
        self._leave_arena(entry)
        self._retries.fail(entry, failure)
        self.tiers.move(entry, "failed")
        self._prefetches.end(entry)
        self.host.drop(entry)

    def _leave_arena(self, entry: Entry) -> None:
        """Give back the adapter's slabs, if it has any."""
        if entry.slabs:
            self.tables.pop(entry.key, None)  # there are none while it is loading
            self.tiers.give_back_slabs(entry)

    def _left_host(self, entry: Entry, packed: Packed) -> None:
        """Handle a copy that the host cache dropped."""
        self.loader.release(packed)
        if entry.tier == "host":
            self.tiers.move(entry, "remote")

    def _host_expects(self, entry: Entry) -> bool:
        """Reserve host memory for a read; returns whether it may start.

        An arena in host memory is filled straight from the file, so nothing is reserved for it.
        """
        return self.host.expect(entry, 0 if self.arena_is_host else entry.host_bytes)

    def _is_in_no_line(self, entry: Entry) -> bool:
        return entry.key not in self._reads and entry.key not in self._fetches

    def check_integrity(self) -> None:
        entries = self.tiers.entries
        self.tiers.check_integrity()
        self.host.check_integrity()
        self._fetches.check_integrity()
        self._reads.check_integrity()
        self._prefetches.check_integrity(entries.values())
        for key, entry in entries.items():
            assert (key in self.tables) == (entry.tier == "device")
            assert self._fetches.is_under_way(key) == (entry.tier == "fetching")
            assert entry.is_wanted or not self._fetches.is_waiting(key)


def _too_large(host_bytes: int, limit_bytes: int) -> Failure:
    return Failure(
        "too_large",
        f"it needs {host_bytes} bytes of host memory on its way to the device, but the limit is "
        f"{limit_bytes}: set host_cache_bytes to {host_bytes} at least",
    )
