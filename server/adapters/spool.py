"""A limit on upload parts that are on disk on their way to the store; no part is held in memory."""

from contextlib import AbstractContextManager

from server.adapters.errors import uploads_busy
from server.faults import Fault
from server.limits.inflow import Arrival, Inflow

# A part has at most 16 MiB, so all parts together take at most 256 MiB of disk.
MAX_PARTS = 16
MAX_PARTS_PER_TENANT = 8


class Spool:
    """Places for parts. A part that gives way to another tenant's is sent again by its client."""

    def __init__(self) -> None:
        self._inflow = Inflow(MAX_PARTS, MAX_PARTS_PER_TENANT, _busy)

    def place(self, tenant_id: str) -> AbstractContextManager[Arrival]:
        """Hold a place for one part. Raises Unavailable if there is none for the tenant."""
        return self._inflow.arrival(tenant_id, 1)


def _busy() -> Fault:
    return uploads_busy("Too many parts are on their way; send it again shortly.")
