"""Packed adapters in host memory, under a byte limit; the least recently used idle goes first."""

from collections.abc import Callable

from lora.entry import Entry


class HostCache:
    """limit_bytes: held and on their way in together. One larger adapter may be here alone.

    on_drop: told of an adapter whose copy here is gone.
    """

    def __init__(self, limit_bytes: int, on_drop: Callable[[Entry], None]) -> None:
        self.limit_bytes = limit_bytes
        self._on_drop = on_drop
        self.used_bytes = 0
        self._entries: dict[str, Entry] = {}  # least recently used first
        self._expected: dict[str, int] = {}  # bytes on their way in

    def expect(self, entry: Entry, size_bytes: int) -> bool:
        """Room for an adapter that is about to be read, made at the cost of others; or not now.

        A mere prefetch takes room from its own tenant only, a request from whoever waits less
        urgently: else those who find no room in the arena would keep the others from it.
        """
        self._trim(size_bytes, entry)
        is_alone = not self._entries and not self._expected
        if self.used_bytes + size_bytes > self.limit_bytes and not is_alone:
            return False
        self._expected[entry.key] = size_bytes
        self.used_bytes += size_bytes
        return True

    def arrived(self, entry: Entry) -> None:
        """It was read, or could not be; what is larger than expected pushes others out."""
        self.used_bytes -= self._expected.pop(entry.key)
        if entry.packed is not None:
            self._entries[entry.key] = entry
            self.used_bytes += entry.packed.host_bytes
            self._trim(0, entry)

    def touch(self, entry: Entry) -> None:
        """It was asked for."""
        if self._entries.pop(entry.key, None):
            self._entries[entry.key] = entry

    def drop(self, entry: Entry) -> None:
        """Its copy here is needed no more, if there is one."""
        if entry.packed is not None:
            del self._entries[entry.key]
            self.used_bytes -= entry.packed.host_bytes
            entry.packed = None
            self._on_drop(entry)

    def check_integrity(self) -> None:
        held = sum(e.packed.host_bytes for e in self._entries.values() if e.packed is not None)
        assert self.used_bytes == held + sum(self._expected.values())
        assert all(entry.packed is not None for entry in self._entries.values())

    def _trim(self, coming_bytes: int, asker: Entry) -> None:
        for entry in list(self._entries.values()):
            if self.used_bytes + coming_bytes <= self.limit_bytes:
                return
            is_waited_for = entry.tier == "host" and entry.is_wanted
            is_needed = entry.tier == "loading" or (
                is_waited_for and entry.urgency <= asker.urgency
            )
            if not is_needed and asker.prefetched_by in (None, entry.claim.tenant_id):
                self.drop(entry)
