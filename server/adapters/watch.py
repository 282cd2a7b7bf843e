"""Tells this gateway's engines within half a second what other gateways did to adapters.

No request depends on it: the meaning of a name is read from the database at every request.

    an alias moved            Prefetch, on behalf of the adapter's tenant
    a pin came, went, moved   PinAdapters with all pins in force; also sent when engines come and
                              go, and once a minute
    an adapter, a version,    ForgetDrafts for the tenant that cannot use it any more: its owner, a
    or a grant went           tenant that had the grant
    a tenant was suspended    ForgetDrafts for all that it used
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from engine.wire.messages import Welcome
from registry.base.base_model import BaseModel
from registry.base.base_models import BaseModels
from registry.catalog import adapter_rows, pins
from registry.catalog.adapter_rows import Version
from registry.catalog.events import Event, EventTail, newest_event_id, prune_events
from registry.ref import BaseRef
from server.database.clock import now_ms
from server.database.database import Database, DatabaseError
from server.pool.engines import Engines

logger = logging.getLogger(__name__)

TICK_S = 0.5
_MINUTE_MS = 60_000
# A larger number of moves at once is an import, and each tenant may have only a few prefetches.
_MAX_PREFETCHES = 64
_CHANGES_PINS = {"pinned", "unpinned", "removed", "restored"}
_ENDS_USE = {"removed", "ungranted"}


@dataclass(slots=True, eq=False)
class AdapterWatch:
    """Reads the events of all gateways, and tells the engines.

    models: the base models that are served.
    engines: returns every base model, those that are going included, and its engines.
    clock: returns Unix milliseconds.
    """

    database: Database
    models: BaseModels
    engines: Callable[[], Iterable[tuple[BaseModel, Engines]]]
    clock: Callable[[], int] = now_ms
    _tail: EventTail | None = None
    # Engines that were told of all pins, by pool; empty if they have to be told again.
    _told: dict[int, tuple[Welcome, ...]] = field(default_factory=dict)
    _cleaned_at_ms: int = 0
    _is_failing: bool = False

    async def tick(self) -> None:
        """Read new events once and act on them. After a failed read, the next tick reads them."""
        try:
            await self._look()
        except DatabaseError as error:
            if not self._is_failing:
                logger.warning("adapter events cannot be read, trying on: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    async def _look(self) -> None:
        if self._tail is None:
            # Earlier moves are skipped: such an adapter may have been in use for a year, or never.
            self._tail = EventTail(await self.database.read(newest_event_id))
        events = await self.database.read(self._tail.read)
        await self._clean_up()
        if any(event.kind in _CHANGES_PINS for event in events):
            self._told = {}
        await self._tell_pins()
        await self._prefetch(events)
        await self._forget_drafts(events)
        self._tail.take(events, self.clock())

    async def _clean_up(self) -> None:
        """Delete old events and tell all pins again once a minute, in case a message was lost."""
        if self.clock() >= self._cleaned_at_ms + _MINUTE_MS:
            await self.database.write(lambda conn: prune_events(conn, self.clock()))
            self._cleaned_at_ms = self.clock()
            self._told = {}

    async def _tell_pins(self) -> None:
        for model, engines in self.engines():
            # Without an engine there is nobody to tell.
            welcomes = engines.welcomes
            if welcomes and welcomes != self._told.get(id(engines)):
                read = partial(pins.pins_in_force, base_revision=model.base_revision)
                found = await self.database.read(read)
                await engines.pin([ref for base, ref in found if self._serves(model, base)])
                self._told[id(engines)] = welcomes

    async def _prefetch(self, events: Sequence[Event]) -> None:
        """Prefetch the versions that names were moved to, each once; the newest _MAX_PREFETCHES."""
        moved = dict.fromkeys(
            (event.tenant_id, event.adapter_id, event.version)
            for event in reversed(events)
            if event.kind == "moved" and event.version is not None
        )
        newest = list(moved)[:_MAX_PREFETCHES]
        ready = [(model, engines) for model, engines in self.engines() if engines.is_ready]
        if not newest or not ready:
            return
        found = await self.database.read(lambda conn: _ready_versions(conn, newest))
        for tenant_id, version in found:
            for model, engines in ready:
                if self._serves(model, version.base):
                    await engines.prefetch(tenant_id, version.ref)

    def _serves(self, model: BaseModel, base: BaseRef) -> bool:
        """Whether requests for adapters of `base` go to this model, or to another of its name."""
        serving = self.models.serving(base)
        is_same = model.base_revision == base.revision
        return is_same and serving is not None and serving.model_id == model.model_id

    async def _forget_drafts(self, events: Sequence[Event]) -> None:
        """Have drafts forgotten that came from answers which the tenants cannot ask for again."""
        for event in events:
            if event.kind == "suspended":
                await self._forget(event.tenant_id)
        ended = dict.fromkeys(
            (event.tenant_id, event.adapter_id, event.version)
            for event in events
            if event.kind in _ENDS_USE
        )
        if ended:
            for tenant_id, digest in await self.database.read(lambda c: _digests(c, list(ended))):
                await self._forget(tenant_id, digest)

    async def _forget(self, tenant_id: str, digest: str | None = None) -> None:
        for _, engines in self.engines():
            await engines.forget_drafts(tenant_id, digest)


def _ready_versions(
    conn: Connection, moved: Sequence[tuple[str, str, int]]
) -> list[tuple[str, Version]]:
    """(tenant_id, version) of the moved versions that are ready."""
    found = [(place[0], adapter_rows.find_version_row(conn, *place)) for place in moved]
    return [
        (tenant_id, version)
        for tenant_id, version in found
        if version is not None and version.state == adapter_rows.READY
    ]


def _digests(
    conn: Connection, places: Sequence[tuple[str, str, int | None]]
) -> list[tuple[str, str]]:
    """(tenant_id, digest) of each version of the given adapters.   places: as in `Event`."""
    return [
        (tenant_id, digest)
        for tenant_id, adapter_id, version in places
        for digest in adapter_rows.list_digests(conn, adapter_id, version)
    ]
