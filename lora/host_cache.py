"""Packed adapters in host memory, under a byte limit; the least recently used is dropped first."""

from collections.abc import Callable

from lora.entry import Entry, Packed


class HostCache:
    """Packed adapters in host memory, and room for those that are being read.

    limit_bytes: limit of adapters and reserved room together.
    on_drop: called with each dropped adapter and its copy.
    """

    def __init__(self, limit_bytes: int, on_drop: Callable[[Entry, Packed], None]) -> None:
        self.limit_bytes = limit_bytes
        self._on_drop = on_drop
        self.used_bytes = 0
        self._entries: dict[str, Entry] = {}  # least recently used first
        self._expected: dict[str, int] = {}  # bytes being read, by key

    def expect(self, entry: Entry, size_bytes: int) -> bool:
        """Reserve room for an adapter that is about to be read; returns whether there is enough.

        To make room, adapters are dropped that no request waits for, or only less urgent ones; a
        prefetch drops only those of its own tenant. Otherwise adapters that wait here for room in
        the arena would keep all others out of it.
        """
        self._trim(size_bytes, entry)
        if self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self._expected[entry.key] = size_bytes
        self.used_bytes += size_bytes
        return True

    def arrived(self, entry: Entry) -> None:
        """Note that an expected adapter was read, or could not be read."""
        self.used_bytes -= self._expected.pop(entry.key)
        if entry.packed is not None:
            self._entries[entry.key] = entry
            self.used_bytes += entry.packed.host_bytes

    def touch(self, entry: Entry) -> None:
        """Mark an adapter as the most recently used."""
        if self._entries.pop(entry.key, None):
            self._entries[entry.key] = entry

    def drop(self, entry: Entry) -> None:
        """Drop the adapter's copy, if there is one."""
        if (packed := entry.packed) is not None:
            del self._entries[entry.key]
            self.used_bytes -= packed.host_bytes
            entry.packed = None
            self._on_drop(entry, packed)

    def check_integrity(self) -> None:
        held = sum(e.packed.host_bytes for e in self._entries.values() if e.packed is not None)
        assert self.used_bytes == held + sum(self._expected.values())
        assert all(entry.packed is not None for entry in self._entries.values())

    def _trim(self, coming_bytes: int, asker: Entry) -> None:
        for entry in list(self._entries.values()):
            if self.used_bytes + coming_bytes <= self.limit_bytes:
                return
            if _may_go(entry, asker) and asker.prefetched_by in (None, entry.claim.tenant_id):
                self.drop(entry)


def _may_go(entry: Entry, asker: Entry) -> bool:
    """Whether `entry` may be dropped for `asker`: no copy of it runs, and no request that is as
    urgent waits for it.
    """
    is_waited_for = entry.tier == "host" and entry.is_wanted
    return entry.tier != "loading" and not (is_waited_for and entry.urgency <= asker.urgency)
