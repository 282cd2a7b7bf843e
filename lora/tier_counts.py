"""Hits, misses, bytes and seconds of every tier, and estimates of an adapter's reload time."""

from typing import Literal

from lora.entry import Entry
from lora.loads import Fetched
from lora.tiers import LoadTier, TierStats

_NEW_SAMPLE = 0.2
_FIRST_GUESS_S_PER_BYTE = 1e-9


class TierCounts:
    """Counters of all tiers since the engine started, and moving averages of the moves' costs."""

    def __init__(self, host_cache_bytes: int, disk_cache_bytes: int) -> None:
        self.device, self.store = TierStats(tier="device"), TierStats(tier="store")
        self.host = TierStats(tier="host", limit_bytes=host_cache_bytes)
        self.disk = TierStats(tier="disk", limit_bytes=disk_cache_bytes)
        # Seconds per byte of each move; a fetch that found the file on disk counts as 0 seconds.
        self._costs = dict.fromkeys(("disk", "host", "device"), _FIRST_GUESS_S_PER_BYTE)

    def asked(self, load_tier: LoadTier | None) -> None:
        """Count a request, given where its adapter has to come from; None is the arena."""
        if load_tier is None:
            self.device.hits += 1
            return
        self.device.misses += 1
        if load_tier == "host":
            self.host.hits += 1
        else:
            self.host.misses += 1

    def fetched(self, entry: Entry, done: Fetched) -> None:
        """Count a fetch that has brought the adapter to disk, or found it there."""
        if done.was_there:
            self.disk.hits += 1
        else:
            self.disk.misses += 1
            self.store.hits += 1
            self.disk.note_load(done.size_bytes, done.seconds)
        seconds = 0.0 if done.was_there else done.seconds
        self._note_cost("disk", done.size_bytes or entry.ref.size_bytes, seconds)

    def moved(
        self, stage: Literal["host", "device"], entry: Entry, seconds: float, size_bytes: int
    ) -> None:
        """Count a move that made the adapter ready for the arena, or placed it there.

        size_bytes: bytes moved.
        """
        (self.host if stage == "host" else self.device).note_load(size_bytes, seconds)
        self._note_cost(stage, entry.packed_bytes, seconds)

    def reload_s(self, entry: Entry) -> float:
        """Estimated seconds to bring the adapter back into the arena after an eviction."""
        moves = ("device",) if entry.packed is not None else ("disk", "host", "device")
        return entry.packed_bytes * sum(self._costs[move] for move in moves)

    def _note_cost(self, move: str, size_bytes: int, seconds: float) -> None:
        if size_bytes:
            cost = self._costs[move]
            self._costs[move] = cost + (seconds / size_bytes - cost) * _NEW_SAMPLE
