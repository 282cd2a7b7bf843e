"""The tier of every adapter, its slabs in the arena, and whether it lies idle there."""

from collections.abc import Callable

from lora.arena import Arena
from lora.entry import Entry
from lora.eviction import Claim, Source
from lora.residency_meter import ResidencyMeter
from lora.tier_counts import TierCounts
from lora.tiers import Residency, Tier
from registry.ref import AdapterRef


class TierMap:
    """The entries of all adapters, in order of use, oldest first. Every change of tier, users or
    pins goes through here, which keeps the log of moves, the meter and the eviction order correct.

    source: evicts the adapters that the arena chooses.   max_entries: adapters remembered; beyond
    it the oldest unwanted adapter is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        counts: TierCounts,
        meter: ResidencyMeter,
        source: Source,
        max_entries: int,
    ) -> None:
        self.arena = arena
        self.entries: dict[str, Entry] = {}
        self.max_entries = max_entries
        self.num_slabs = 0
        self._counts = counts
        self._meter = meter
        self._source = source
        self._moves: list[Residency] = []

    def touch(self, ref: AdapterRef, tenant_id: str, may_forget: Callable[[Entry], bool]) -> Entry:
        """The entry of `ref`, now the most recently used; a new entry is kept for this tenant.

        may_forget: whether an unwanted entry may be forgotten: not while it is queued for a move.
        """
        entry = self.entries.pop(ref.object_key, None)
        if entry is None:
            entry = Entry(ref, Claim(tenant_id))
            if len(self.entries) >= self.max_entries:
                self._forget_oldest(may_forget)
        self.entries[entry.key] = entry
        return entry

    def move(self, entry: Entry, tier: Tier) -> None:
        entry.tier = tier
        self._moves.append(_residency(entry))
        self._meter.note(entry)
        self._note_idle(entry)

    def set_pinned(self, entry: Entry, is_pinned: bool) -> None:
        if entry.is_pinned != is_pinned:
            entry.is_pinned = is_pinned
            self._meter.note(entry)
            self._note_idle(entry)

    def acquire(self, entry: Entry) -> None:
        """Count one more request that holds the adapter in the arena until it is released."""
        entry.users += 1
        self._note_idle(entry)

    def release(self, entry: Entry) -> None:
        assert entry.users > 0, "released more often than acquired"
        entry.users -= 1
        self._note_idle(entry)

    def take_slabs(self, entry: Entry, num_slabs: int) -> None:
        """Allocate slabs of the arena for a new placement. Raises ArenaFull."""
        entry.slabs = self.arena.allocate(num_slabs, entry.key)
        entry.generation += 1
        entry.num_hits = 0
        self.num_slabs += len(entry.slabs)

    def give_back_slabs(self, entry: Entry) -> None:
        self.arena.retire(entry.slabs)
        self.num_slabs -= len(entry.slabs)
        entry.slabs = []
        self.arena.idle.adapter_left(entry.key)

    def locations(self) -> list[Residency]:
        """Current tier of every adapter."""
        return [_residency(entry) for entry in self.entries.values()]

    def take_moves(self) -> list[Residency]:
        """Every move since the last call, oldest first."""
        moves, self._moves = self._moves, []
        return moves

    def check_integrity(self) -> None:
        assert self.num_slabs == sum(len(entry.slabs) for entry in self.entries.values())
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.users >= 0
            assert bool(entry.slabs) == (entry.tier in ("loading", "device"))
            assert bool(entry.slabs) or entry.users <= len(entry.waiters), "in use, and not there"
            assert self.arena.owned_by(key) == len(entry.slabs)
            assert entry.packed is not None or entry.tier not in ("host", "loading")
            assert (key in self.arena.idle) == entry.is_idle

    def _forget_oldest(self, may_forget: Callable[[Entry], bool]) -> None:
        for key, entry in self.entries.items():
            is_far = entry.tier in ("remote", "disk", "failed")
            if is_far and not entry.is_wanted and may_forget(entry):
                del self.entries[key]
                self._meter.forget(key)
                return

    def _note_idle(self, entry: Entry) -> None:
        """Update the arena's eviction order after any change of tier, users or pins."""
        is_known = entry.key in self.arena.idle
        if entry.is_idle and not is_known:
            self.arena.idle.add(
                self._source,
                entry.key,
                entry.claim,
                num_slabs=len(entry.slabs),
                num_hits=entry.num_hits,
                reload_s=self._counts.reload_s(entry),
            )
        elif not entry.is_idle and is_known:
            self.arena.idle.take(entry.key)


def _residency(entry: Entry) -> Residency:
    return Residency(
        object_key=entry.key,
        digest=entry.ref.digest,
        tier=entry.tier,
        size_bytes=entry.packed_bytes or entry.ref.size_bytes,
        error=entry.failure.error if entry.failure and entry.tier == "failed" else None,
    )
