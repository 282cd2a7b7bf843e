"""Counts, by tenant, of the adapters that only a prefetch wants."""

from collections import Counter
from collections.abc import Iterable

from lora.entry import Entry


class Prefetches:
    """Counts prefetches under way. max_per_tenant: prefetches that a tenant may have at a time."""

    def __init__(self, max_per_tenant: int) -> None:
        self.max_per_tenant = max_per_tenant
        self._num_by_tenant: Counter[str] = Counter()

    def may_begin(self, tenant_id: str) -> bool:
        return self._num_by_tenant[tenant_id] < self.max_per_tenant

    def begin(self, entry: Entry, tenant_id: str) -> None:
        entry.prefetched_by = tenant_id
        self._num_by_tenant[tenant_id] += 1

    def end(self, entry: Entry) -> None:
        """End the adapter's prefetch, if any: it arrived, it failed, or a request wants it now."""
        if (tenant_id := entry.prefetched_by) is not None:
            entry.prefetched_by = None
            self._num_by_tenant[tenant_id] -= 1
            if not self._num_by_tenant[tenant_id]:
                del self._num_by_tenant[tenant_id]

    def check_integrity(self, entries: Iterable[Entry]) -> None:
        prefetchers = Counter(e.prefetched_by for e in entries if e.prefetched_by)
        assert self._num_by_tenant == prefetchers
