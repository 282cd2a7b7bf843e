"""Places on disk for parts on their way to the store: so many at once, and none in memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from server.adapters.errors import uploads_busy

# Of 16 MiB at most: 256 MiB of disk.
MAX_PARTS = 16
MAX_PARTS_PER_TENANT = 8


class Spool:
    """One tenant's slow senders cannot take all places."""

    def __init__(self) -> None:
        self._parts: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant_id: str) -> Iterator[None]:
        """Raises Unavailable when all are taken."""
        if self._parts.total() >= MAX_PARTS or self._parts[tenant_id] >= MAX_PARTS_PER_TENANT:
            raise uploads_busy("Too many parts are on their way; send it again shortly.")
        self._parts[tenant_id] += 1
        try:
            yield
        finally:
            self._parts[tenant_id] -= 1
            if not self._parts[tenant_id]:
                del self._parts[tenant_id]
