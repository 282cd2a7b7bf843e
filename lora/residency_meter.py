"""Time that every adapter spends in each tier, which its owner pays for besides tokens."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lora.entry import Entry
from lora.tiers import ResidentTier
from registry.ref import AdapterRef


@dataclass(frozen=True, slots=True)
class Stay:
    """An adapter in one tier. slabs: slabs of the arena, 0 elsewhere.   size_bytes: bytes there.

    An adapter on its way into the arena counts as there, with its slabs; one on its way to disk
    counts nowhere.
    """

    adapter: AdapterRef
    tier: ResidentTier
    size_bytes: int
    slabs: int
    is_pinned: bool

    @classmethod
    def of(cls, entry: Entry) -> "Stay | None":
        """The adapter's tier and size now; None if it takes no memory or disk."""
        pinned = entry.is_pinned
        match entry.tier:
            case "device" | "loading":
                return cls(entry.ref, "device", entry.packed_bytes, len(entry.slabs), pinned)
            case "host":
                return cls(entry.ref, "host", entry.host_bytes, 0, pinned)
            case "disk":
                return cls(entry.ref, "disk", entry.ref.size_bytes, 0, pinned)
        return None


class ResidencyMeter:
    """Meters residency in whole milliseconds.

    All times are rounded down alike, so that an adapter's stays add up without gaps.
    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._here: dict[str, tuple[Stay, int]] = {}  # by key: the stay, and its start in ms
        self._spent: Counter[Stay] = Counter()

    def note(self, entry: Entry) -> None:
        """Note the adapter's stay after it moved, was pinned or was unpinned."""
        now_ms = self._now_ms()
        self._close(entry.key, now_ms)
        if stay := Stay.of(entry):
            self._here[entry.key] = stay, now_ms

    def forget(self, key: str) -> None:
        """End the stay of an adapter that is no longer tracked."""
        self._close(key, self._now_ms())

    def take(self) -> list[tuple[Stay, int]]:
        """Total milliseconds of every stay since the last call."""
        now_ms = self._now_ms()
        for key, (stay, _) in list(self._here.items()):
            self._close(key, now_ms)
            self._here[key] = stay, now_ms
        spent, self._spent = self._spent, Counter()
        return [(stay, duration_ms) for stay, duration_ms in spent.items() if duration_ms]

    def _close(self, key: str, now_ms: int) -> None:
        if here := self._here.pop(key, None):
            stay, since_ms = here
            self._spent[stay] += now_ms - since_ms

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
