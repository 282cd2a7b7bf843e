"""Adapters that stay in the arena whether requests use them or not."""

from collections.abc import Sequence

from lora.entry import Entry
from lora.eviction import EVERYBODY
from lora.tier_map import TierMap
from lora.transitions import Transitions
from registry.ref import AdapterRef


class Pins:
    """Adapters to be pinned, in the order requested; those that fit the limit are `is_pinned`.

    max_slabs: slabs of the arena for all pinned adapters together.
    """

    def __init__(self, tiers: TierMap, transitions: Transitions[object], max_slabs: int) -> None:
        self.max_slabs = max_slabs
        self._tiers = tiers
        self._transitions = transitions
        self._entries: dict[str, Entry] = {}

    def replace(self, refs: Sequence[AdapterRef]) -> None:
        """Pin exactly these adapters, in this order, as far as `max_slabs` allows."""
        before, self._entries = self._entries, {}
        for ref in refs:
            entry = self._entries[ref.object_key] = self._transitions.touch(ref, EVERYBODY)
            self._tiers.set_pinned(entry, True)
        for key in before.keys() - self._entries.keys():
            self._tiers.set_pinned(before[key], False)
            self._transitions.drop_if_unwanted(before[key])
        self.bring_in()

    def bring_in(self) -> None:
        """Start the next move of every adapter within the limit that is not in the arena yet."""
        left = self.max_slabs
        for entry in self._entries.values():
            num_slabs = entry.num_slabs
            self._tiers.set_pinned(entry, num_slabs <= left)
            if not entry.is_pinned:
                self._transitions.drop_if_unwanted(entry)
                continue
            left -= num_slabs
            self._transitions.advance(entry)
            if entry.tier == "host" and self._tiers.arena.make_room(num_slabs):
                self._transitions.place(entry)

    @property
    def num_slabs(self) -> int:
        return sum(len(entry.slabs) for entry in self._entries.values() if entry.is_pinned)

    def check_integrity(self) -> None:
        assert self.num_slabs <= self.max_slabs
