"""Adapters that nobody but a prefetch wants, counted by tenant."""

from collections import Counter
from collections.abc import Iterable

from lora.entry import Entry


class Prefetches:
    """Counts prefetches that are under way.   max_per_tenant: of them, at a time."""

    def __init__(self, max_per_tenant: int) -> None:
        self.max_per_tenant = max_per_tenant
        self._num_by_tenant: Counter[str] = Counter()

    def may_begin(self, tenant_id: str) -> bool:
        return self._num_by_tenant[tenant_id] < self.max_per_tenant

    def begin(self, entry: Entry, tenant_id: str) -> None:
        entry.prefetched_by = tenant_id
        self._num_by_tenant[tenant_id] += 1

    def end(self, entry: Entry) -> None:
        """End its prefetch, if it has one: it has come, or failed, or a request wants it now."""
        if (tenant_id := entry.prefetched_by) is not None:
            entry.prefetched_by = None
            self._num_by_tenant[tenant_id] -= 1
            if not self._num_by_tenant[tenant_id]:
                del self._num_by_tenant[tenant_id]

    def check_integrity(self, entries: Iterable[Entry]) -> None:
        prefetchers = Counter(e.prefetched_by for e in entries if e.prefetched_by)
        assert self._num_by_tenant == prefetchers
