"""All adapters of an engine and their states: applies events by the table of `lora.transitions`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, assert_never

from lora.arena import Arena
from lora.entry import Entry
from lora.errors import Failure
from lora.eviction import Claim, Key
from lora.host_cache import HostCache
from lora.load_queue import LoadQueue
from lora.loads import Fetched, Loaded, Loader, Placed, Read, TablesT_co
from lora.residency_meter import ResidencyMeter
from lora.tier_counts import TierCounts
from lora.tiers import Residency
from lora.transitions import DEVICE_TABLE, HOST_TABLE, Effect, Event
from registry.ref import AdapterRef

_MAX_READS = 2
"""Reads given to the loader at once, one running and one next; the others wait in a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyConfig:
    """Limits of one engine's adapters.

    host_cache_bytes: limit of packed adapters in host memory, including those on their way to the
    arena.   disk_cache_bytes: the fetcher's quota, only reported in the figures.
    arena_is_host: the arena is host memory (CPU), so adapters have no second copy there.
    max_fetches: fetches under way.   prefetch_per_tenant: adapters of one tenant that only a
    prefetch wants.   max_pinned_share: share of the arena's slabs that pinned adapters may take.
    max_entries: adapters remembered; beyond it the oldest unwanted adapter is forgotten.
    """

    host_cache_bytes: int = 256 << 20
    disk_cache_bytes: int = 0
    arena_is_host: bool = True
    max_fetches: int = 8
    prefetch_per_tenant: int = 4
    max_pinned_share: float = 0.5
    max_entries: int = 100_000


class ResidencyMachine(Generic[TablesT_co]):
    """Applies events to adapters as the table has it, and carries out the effects.

    entries: in order of use, oldest first.   prefetches: how many are under way, by tenant.
    tables: (generation, tables) of every adapter in the arena, by key.
    num_slabs: slabs of the arena that adapters have.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader[TablesT_co],
        config: ResidencyConfig,
        clock: Callable[[], float],
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.prefetches: Counter[str] = Counter()
        self.tables: dict[str, tuple[int, TablesT_co]] = {}
        self.host = HostCache(config.host_cache_bytes)
        self.counts = TierCounts(
            0 if config.arena_is_host else config.host_cache_bytes, config.disk_cache_bytes
        )
        self.meter = ResidencyMeter(clock)
        self.num_slabs = 0
        self.num_evictions = 0
        self._arena, self._loader, self._config, self._clock = arena, loader, config, clock
        self._table = HOST_TABLE if config.arena_is_host else DEVICE_TABLE
        self._fetches, self._reads = LoadQueue(config.max_fetches), LoadQueue(_MAX_READS)
        self._lines = {"remote": self._fetches, "disk": self._reads}  # by the state of who waits
        self._moves: list[Residency] = []

    def touch(self, ref: AdapterRef, tenant_id: str) -> Entry:
        """The entry of `ref`, now the most recently used; a new entry is kept for this tenant."""
        entry = self.entries.pop(ref.object_key, None)
        if entry is None:
            entry = Entry(ref, Claim(tenant_id))
            if len(self.entries) >= self._config.max_entries:
                self._forget_oldest()
        self.entries[entry.key] = entry
        self.host.touch(entry)
        return entry

    # ---- events ----

    def happen(self, entry: Entry, event: Event) -> None:
        """Change the adapter's state and carry out the effects, as the table has it."""
        if (change := self._table.get((entry.state, event))) is None:
            assert event in ("wanted", "unwanted"), f"{event} in the state {entry.state}"
            return
        tier = entry.tier
        entry.state, effects = change
        for effect in effects:
            self._carry_out(effect, entry)
        if entry.tier != tier:
            self._moves.append(_residency(entry))
            self.meter.note(entry)
            self.note_idle(entry)

    def note_wish(self, entry: Entry, event: Event = "wanted") -> None:
        """Note that something wants the adapter, which is retried if its failure is long enough
        ago; or that nothing wants it any more.
        """
        if not entry.is_wanted:
            event = "unwanted"
        elif entry.failure is not None and entry.is_due(self._clock()):
            event = "retried"
        self.happen(entry, event)

    def take_in(self, done: Loaded[TablesT_co]) -> None:
        """Process one report of the loader."""
        entry = self.entries[done.key]
        match done:
            case Fetched():
                self._fetched(entry, done)
            case Read():
                self._read(entry, done)
            case Placed():
                if isinstance(done.outcome, Failure):
                    self._lose(entry, done.outcome)
                    return
                self.counts.moved("device", entry, done.seconds, done.size_bytes)
                entry.forgive()
                self.tables[entry.key] = entry.generation, done.outcome
                self.happen(entry, "placed")

    def start_next(self) -> None:
        """Give the loader more work, in the order of the queues."""
        while entry := self._fetches.start_next(lambda entry: True):
            self.happen(entry, "begun")
        while entry := self._reads.start_next(self._make_host_room):
            self.happen(entry, "begun")

    def place(self, entry: Entry) -> int:
        """Take slabs and start the copy into them; returns its bytes. Raises ArenaFull."""
        assert entry.packed is not None
        entry.slabs = self._arena.allocate(entry.packed.num_slabs, entry.key)
        entry.generation += 1
        entry.num_hits = 0
        self.num_slabs += len(entry.slabs)
        self.happen(entry, "given_slabs")
        return entry.packed.size_bytes

    def evict(self, key: Key) -> None:
        """Implement lora.eviction.Source."""
        entry = self.entries[str(key)]
        self.num_evictions += 1
        self.happen(entry, "evicted" if entry.packed is None else "evicted_to_host")

    def _fetched(self, entry: Entry, done: Fetched) -> None:
        self._fetches.done(entry.key)
        self.counts.disk.used_bytes = done.used_bytes or self.counts.disk.used_bytes
        if done.failure is None:
            self.counts.fetched(entry, done)
            entry.was_on_disk = done.was_there
            # An arena in host memory is filled straight from the file, so it takes nothing else.
            entry.host_bytes = 0 if self._config.arena_is_host else done.host_bytes
            if entry.host_bytes > self.host.limit_bytes:
                self._fail(entry, _too_large(entry.host_bytes, self.host.limit_bytes))
            else:
                self.happen(entry, "fetched")
        elif done.failure.kind == "dropped":
            self.happen(entry, "dropped")
        else:
            self.counts.store.misses += done.failure.kind == "missing"
            self._fail(entry, done.failure)

    def _read(self, entry: Entry, done: Read) -> None:
        self._reads.done(entry.key)
        if isinstance(done.outcome, Failure):
            self._lose(entry, done.outcome)
            return
        assert done.outcome.digest == entry.ref.digest, "another adapter was read"
        entry.hold(done.outcome)
        self.counts.moved("host", entry, done.seconds, done.size_bytes)
        self.happen(entry, "read")

    def _lose(self, entry: Entry, failure: Failure) -> None:
        """Handle a packed file that could not be used: fetch it again if that can help."""
        if entry.lose(failure):
            self.happen(entry, "lost")
        else:
            self._fail(entry, failure)

    def _fail(self, entry: Entry, failure: Failure) -> None:
        entry.fail(failure, self._clock())
        self.happen(entry, "failed")

    # ---- effects ----

    def _carry_out(self, effect: Effect, entry: Entry) -> None:
        match effect:
            case "line_up":
                if entry.is_wanted:
                    self._lines[entry.state].add(entry)
            case "leave_line":
                self._lines[entry.state].discard(entry.key)
            case "fetch":
                self._loader.fetch(entry.ref)
            case "drop_fetch":
                self._loader.drop(entry.key)
            case "read":
                self._loader.load(entry.ref)
            case "copy":
                assert entry.packed is not None
                self._loader.place(entry.ref, entry.packed, entry.slabs)
            case "free_slabs":
                self.tables.pop(entry.key, None)  # there are none while it is loading
                self.num_slabs -= len(entry.slabs)
                self._arena.retire(entry.slabs)
                self._arena.idle.adapter_left(entry.key)
                entry.slabs = []
            case "free_copy":
                if packed := self.host.drop(entry):
                    self._loader.release(packed)
            case "expect_copy":
                self.host.expect(entry)
            case "end_prefetch":
                self.end_prefetch(entry)
            case _:
                assert_never(effect)

    def end_prefetch(self, entry: Entry) -> None:
        """End the adapter's prefetch, if any: it arrived, it failed, or a request wants it now."""
        if (tenant_id := entry.prefetched_by) is not None:
            entry.prefetched_by = None
            self.prefetches[tenant_id] -= 1
            if not self.prefetches[tenant_id]:
                del self.prefetches[tenant_id]

    def note_idle(self, entry: Entry) -> None:
        """Update the arena's eviction order after any change of tier, users or pins."""
        idle = self._arena.idle
        if entry.is_idle == (entry.key in idle):
            return
        if not entry.is_idle:
            idle.take(entry.key)
            return
        idle.add(
            self,
            entry.key,
            entry.claim,
            num_slabs=len(entry.slabs),
            num_hits=entry.num_hits,
            reload_s=self.counts.reload_s(entry),
        )

    def _make_host_room(self, entry: Entry) -> bool:
        """Make room in host memory for a read; returns whether it may start."""
        victims = self.host.victims(entry)
        if victims is None:
            return False
        for victim in victims:
            self.happen(victim, "displaced")
        return True

    def _forget_oldest(self) -> None:
        for key, entry in self.entries.items():
            if entry.state in ("remote", "disk", "failed") and not entry.is_wanted:
                del self.entries[key]
                self.meter.forget(key)
                return

    # ---- what is told of it ----

    def locations(self) -> list[Residency]:
        """Current tier of every adapter."""
        return [_residency(entry) for entry in self.entries.values()]

    def take_moves(self) -> list[Residency]:
        """Every move since the last call, oldest first."""
        moves, self._moves = self._moves, []
        return moves

    def check_integrity(self) -> None:
        self.host.check_integrity()
        entries = self.entries.values()
        assert self.num_slabs == sum(len(entry.slabs) for entry in entries)
        assert self.prefetches == Counter(e.prefetched_by for e in entries if e.prefetched_by)
        for state, begun, line in (
            ("remote", "fetching", self._fetches),
            ("disk", "reading", self._reads),
        ):
            line.check_integrity(
                {entry.key for entry in entries if entry.state == state and entry.is_wanted},
                {entry.key for entry in entries if entry.state == begun},
            )
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.users >= 0
            assert bool(entry.slabs) == (entry.state in ("loading", "device"))
            assert bool(entry.slabs) or entry.users <= len(entry.waiters), "in use, and not there"
            assert self._arena.owned_by(key) == len(entry.slabs)
            assert entry.packed is not None or entry.state not in ("host", "loading")
            assert (key in self._arena.idle) == entry.is_idle
            assert (key in self.tables) == (entry.state == "device")


def _residency(entry: Entry) -> Residency:
    return Residency(
        object_key=entry.key,
        digest=entry.ref.digest,
        tier=entry.tier,
        size_bytes=entry.packed_bytes or entry.ref.size_bytes,
        error=entry.failure.error if entry.failure and entry.tier == "failed" else None,
    )


def _too_large(host_bytes: int, limit_bytes: int) -> Failure:
    return Failure(
        "too_large",
        f"it needs {host_bytes} bytes of host memory on its way to the device, but the limit is "
        f"{limit_bytes}: set host_cache_bytes to {host_bytes} at least",
    )
