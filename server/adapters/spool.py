"""A limit on upload parts that are on disk on their way to the store; no part is held in memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from server.adapters.errors import uploads_busy

# A part has at most 16 MiB, so all parts together take at most 256 MiB of disk.
MAX_PARTS = 16
MAX_PARTS_PER_TENANT = 8


class Spool:
    """Counts places by tenant, so that one tenant's slow senders cannot take all of them."""

    def __init__(self) -> None:
        self._parts: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant_id: str) -> Iterator[None]:
        """Hold a place for one part. Raises Unavailable if the gateway or the tenant has none."""
        if self._parts.total() >= MAX_PARTS or self._parts[tenant_id] >= MAX_PARTS_PER_TENANT:
            raise uploads_busy("Too many parts are on their way; send it again shortly.")
        self._parts[tenant_id] += 1
        try:
            yield
        finally:
            self._parts[tenant_id] -= 1
            if not self._parts[tenant_id]:
                del self._parts[tenant_id]
