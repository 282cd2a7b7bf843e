"""Packed adapters in host memory, under a byte limit; the least recently used is dropped first."""

from lora.entry import Entry, Packed


class HostCache:
    """Packed adapters in host memory, and room for those that are being read.

    limit_bytes: limit of adapters and reserved room together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: dict[str, Entry] = {}  # least recently used first

    def victims(self, asker: Entry) -> list[Entry] | None:
        """Adapters to drop so that there is room to read `asker`; None if it has to wait for room.

        Adapters may be dropped that no request waits for, or only less urgent ones; for a prefetch,
        only those of its own tenant. Otherwise adapters that wait here for room in the arena would
        keep all others out of it.
        """
        missing_bytes = self.used_bytes + asker.host_bytes - self.limit_bytes
        victims = []
        for entry in self._entries.values():
            if missing_bytes <= 0:
                break
            if _may_go(entry, asker):
                victims.append(entry)
                missing_bytes -= entry.host_bytes
        return victims if missing_bytes <= 0 else None

    def expect(self, entry: Entry) -> None:
        """Reserve room for an adapter that is about to be read."""
        self._entries[entry.key] = entry
        self.used_bytes += entry.host_bytes

    def touch(self, entry: Entry) -> None:
        """Mark an adapter as the most recently used."""
        if self._entries.pop(entry.key, None):
            self._entries[entry.key] = entry

    def drop(self, entry: Entry) -> Packed | None:
        """Remove and return the adapter's copy, if there is one, or give up the room for it."""
        if self._entries.pop(entry.key, None):
            self.used_bytes -= entry.host_bytes
        packed, entry.packed = entry.packed, None
        return packed

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(entry.host_bytes for entry in self._entries.values())
        for entry in self._entries.values():
            assert (entry.packed is None) == (entry.state == "reading")


def _may_go(entry: Entry, asker: Entry) -> bool:
    """Whether `entry` may be dropped for `asker`: no read or copy of it runs, no request that is as
    urgent waits for it, and it is no other tenant's if `asker` is only prefetched.
    """
    if entry.state in ("reading", "loading"):
        return False
    if asker.prefetched_by not in (None, entry.claim.tenant_id):
        return False
    return not (entry.state == "host" and entry.is_wanted and entry.urgency <= asker.urgency)
