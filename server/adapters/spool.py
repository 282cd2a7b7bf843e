"""Upload parts on their way to the store: each is a file of its own, and none is held in memory.

A part has a place and room on the disk before its first byte is taken, and the parts of unfinished
uploads, pending ones, have a limit together and one for each tenant.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from registry.errors import NoRoom, Unavailable
from registry.storage.free_space import SMALL_SHARE, WorkDir
from registry.uploads.parts import Pending
from server.limits.inflow import Arrival, Inflow

MAX_PARTS = 16
MAX_PARTS_PER_TENANT = 8
MAX_PENDING_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """A part's place.   path: for its bytes.   arrival: the body."""

    path: Path
    arrival: Arrival


class Spool:
    """Counts places and bytes by tenant, so that no tenant can take all of them.

    A part that gives way to another tenant's is sent again by its client.
    work: where parts are received.   store: the folder where they are stored then; None for a
    bucket.   stored: reads the bytes of stored parts, those of the given tenant among them.
    max_pending_bytes: of all tenants; None for 64 GiB, or a quarter of the store's volume if that
    is less.   max_pending_share: what one tenant may have of them.
    """

    def __init__(
        self,
        work: WorkDir,
        store: Path | None,
        stored: Callable[[str], Awaitable[Pending]],
        *,
        max_pending_bytes: int | None = None,
        max_pending_share: float = 0.25,
    ) -> None:
        if max_pending_bytes is None:
            max_pending_bytes = MAX_PENDING_BYTES
            if store is not None:
                size_bytes = work.space.look(store).size_bytes
                max_pending_bytes = min(max_pending_bytes, size_bytes // SMALL_SHARE)
        self._work = work
        self._store = store
        self._stored = stored
        self._max = Pending(max_pending_bytes, int(max_pending_bytes * max_pending_share))
        self._places = Inflow(MAX_PARTS, MAX_PARTS_PER_TENANT, _busy)
        self._coming: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, tenant_id: str, size_bytes: int) -> AsyncIterator[Place]:
        """Hold a place and room for one part of at most `size_bytes`.

        Raises Unavailable if there is no place for the tenant; NoRoom if the disk has none, or if
        the part would exceed the room for parts of unfinished uploads.
        """
        this = Counter({tenant_id: size_bytes})
        with self._places.arrival(tenant_id, 1) as arrival:
            self._coming += this
            coming = Pending(self._coming.total(), self._coming[tenant_id])
            try:
                with self._work.folder("part-", size_bytes, (self._store, size_bytes)) as folder:
                    # Read now, so that every other part is in it, or is under way; a part that is
                    # both is counted twice, and the tenant sends its own again.
                    self._check_pending(coming, await self._stored(tenant_id))
                    yield Place(folder / "part", arrival)
            except OSError as error:
                raise uploads_busy("The part cannot be kept now; send it again shortly.") from error
            finally:
                self._coming -= this

    def _check_pending(self, coming: Pending, stored: Pending) -> None:
        if coming.of_tenant + stored.of_tenant > self._max.of_tenant:
            raise NoRoom(
                f"Your unfinished uploads may have {self._max.of_tenant} bytes on the server at a "
                "time. Complete or cancel one, or ask the operator for room."
            )
        if coming.of_all + stored.of_all > self._max.of_all:
            raise NoRoom


def uploads_busy(message: str) -> Unavailable:
    """The fault of an upload that has to wait because the gateway is busy with others."""
    return Unavailable(message, code="uploads_busy", retry_after_s=2.0)


def _busy() -> Unavailable:
    return uploads_busy("Too many parts are on their way; send it again shortly.")
