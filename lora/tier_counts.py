"""Hits, misses, bytes and seconds of every tier, and what getting an adapter back would take."""

from dataclasses import dataclass
from typing import Literal

from lora.entry import Entry

_NEW_SAMPLE = 0.2
_FIRST_GUESS_S_PER_BYTE = 1e-9


@dataclass(slots=True)
class TierCount:
    """See engine.messages.TierStats."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    used_bytes: int = 0
    limit_bytes: int = 0

    def note_load(self, size_bytes: int, seconds: float) -> None:
        self.loads += 1
        self.load_bytes += size_bytes
        self.load_seconds += seconds


class TierCounts:
    """Since the engine started; the costs are averages that forget."""

    def __init__(self, host_cache_bytes: int, disk_cache_bytes: int) -> None:
        self.device, self.store = TierCount(), TierCount()
        self.host = TierCount(limit_bytes=host_cache_bytes)
        self.disk = TierCount(limit_bytes=disk_cache_bytes)
        # Seconds a byte of each move; a fetch of what was on disk already took none.
        self._costs = dict.fromkeys(("disk", "host", "device"), _FIRST_GUESS_S_PER_BYTE)

    def asked(self, entry: Entry) -> None:
        """A request came for it."""
        if entry.tier == "device":
            self.device.hits += 1
            return
        self.device.misses += 1
        if entry.packed is not None:
            self.host.hits += 1
        else:
            self.host.misses += 1

    def fetched(self, entry: Entry, seconds: float, size_bytes: int, *, was_there: bool) -> None:
        """It is on disk now."""
        if was_there:
            self.disk.hits += 1
        else:
            self.disk.misses += 1
            self.store.hits += 1
            self.disk.note_load(size_bytes, seconds)
        self._note_cost("disk", size_bytes or entry.ref.size_bytes, 0.0 if was_there else seconds)

    def moved(
        self, stage: Literal["host", "device"], entry: Entry, seconds: float, size_bytes: int
    ) -> None:
        """It is ready for the arena, or in it, now. size_bytes: moved for that."""
        (self.host if stage == "host" else self.device).note_load(size_bytes, seconds)
        self._note_cost(stage, entry.packed_bytes, seconds)

    def reload_s(self, entry: Entry) -> float:
        """What bringing it back into the arena would take, once it were evicted."""
        moves = ("device",) if entry.packed is not None else ("disk", "host", "device")
        return entry.packed_bytes * sum(self._costs[move] for move in moves)

    def _note_cost(self, move: str, size_bytes: int, seconds: float) -> None:
        if size_bytes:
            cost = self._costs[move]
            self._costs[move] = cost + (seconds / size_bytes - cost) * _NEW_SAMPLE
