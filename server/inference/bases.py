"""The base models behind a gateway. Whatever has an engine belongs to one of them.

A base model that was removed or replaced stays until its last request has ended and its engines'
journals are settled; new requests go to its successor, as soon as that has an engine.
"""

from collections.abc import Iterator, Sequence

from engine.errors import EngineDeadError
from engine.wire.messages import Residency
from engine.wire.records import JournalRecords
from registry.base.base_models import BaseModels
from registry.ref import BaseRef
from server.inference import errors
from server.inference.served_base import ServedBase
from server.pool.control_files import BaseEntry
from server.pool.engines import EngineFigures, Engines, nearest
from server.pool.running import Parent


class Bases:
    """The base models, by home and in the order of the supervisor's list.

    entries: all base models as the supervisor last told, also those that could not be prepared.
    served: those of them that are served.   pools: the engines of every home, also of those of
    which nothing but journals is left.   models: those that adapters may be for, kept up to date.
    parents: the requests for routes that are under way, by id; their attempts are requests of their
    own.
    """

    def __init__(
        self, entries: Sequence[BaseEntry] = (), served: Sequence[ServedBase] = ()
    ) -> None:
        self.models = BaseModels()
        self.parents: dict[str, Parent] = {}
        self.entries = tuple(entries)
        self._served: dict[str, ServedBase] = {}
        self.pools: dict[str, Engines] = {}
        for base in served:
            self.add(base)

    # ---- which there are ----

    def __iter__(self) -> Iterator[ServedBase]:
        """All that have requests or may get some, those that are going included."""
        return iter(self._served.values())

    @property
    def current(self) -> list[ServedBase]:
        """The base models that new requests get, the default one first."""
        names = dict.fromkeys(entry.name for entry in self.entries if not entry.is_former)
        return [base for name in names if (base := self.named(name))]

    @property
    def default(self) -> ServedBase:
        """The base model that is meant where none is named. Raises Unavailable without any."""
        if not (current := self.current):
            raise errors.engine_unavailable()
        return current[0]

    def at(self, home: str) -> ServedBase | None:
        """The base model with this home."""
        return self._served.get(home)

    def named(self, name: str) -> ServedBase | None:
        """The base model that takes requests for this name; None for any other name.

        A successor that has no engine yet is waited for by the one before it.
        """
        entries = [entry for entry in self.entries if entry.name == name]
        if all(entry.is_former for entry in entries):
            return None
        found = [base for e in entries if (base := self._served.get(e.home))]
        # Former ones come last in the list.
        return next((base for base in found if base.engines.is_ready), next(iter(found), None))

    def serving(self, ref: BaseRef) -> ServedBase | None:
        """The base model that serves the adapters of `ref`; None if none does."""
        current = {base.model_id: base for base in self.current}
        model = BaseModels(*(base.model for base in current.values())).serving(ref)
        return current[model.model_id] if model else None

    # ---- how they come and go ----

    def follow(self, entries: Sequence[BaseEntry]) -> list[Engines]:
        """Take over the supervisor's list; returns the engines of homes that are no longer in it.

        A base model whose entry is new is served from `add` on.
        """
        self.entries = tuple(entries)
        gone = self.pools.keys() - {entry.home for entry in entries}
        for home in gone:
            self._served.pop(home, None)
        self._list_models()
        return [self.pools.pop(home) for home in gone]

    def add(self, base: ServedBase) -> None:
        """Serve a base model whose entry is in the list."""
        self._served[base.home] = base
        self.pools[base.home] = base.engines
        self._list_models()

    def call_off_former(self) -> None:
        """Have those end that are going: at once, or when a successor takes their requests."""
        for entry in self.entries:
            base = self._served.get(entry.home)
            if not entry.is_former or base is None:
                continue
            successor = self.named(entry.name)
            if successor is None:
                base.keeper.close()
            elif successor is not base:
                base.keeper.succeed()
        self._list_models()

    # ---- requests under way ----

    @property
    def num_running(self) -> int:
        return sum(len(base.running) for base in self)

    async def abort_all(self) -> None:
        """End every request under way."""
        for base in list(self):
            for request_id in base.running:
                await base.abort(request_id)

    # ---- all engines ----

    @property
    def is_ready(self) -> bool:
        """Whether any base model takes requests, or would wake for one."""
        return any(base.engines.is_ready or base.keeper.state == "asleep" for base in self.current)

    @property
    def num_deaths(self) -> int:
        """How often an engine has died since the gateway's start."""
        return sum(engines.num_deaths for engines in self.pools.values())

    def figures(self) -> list[tuple[str, EngineFigures]]:
        """Figures of every engine, with the name of its base model; "" if that is gone."""
        names = {base.home: base.model_id for base in self}
        homes = sorted(self.pools, key=lambda home: home not in names)
        return [(names.get(home, ""), it) for home in homes for it in self.pools[home].figures()]

    def engine_ids(self) -> list[str]:
        """Ids of the engines whose journals can be read."""
        found = (engine.engine_id for pool in self.pools.values() for engine in pool)
        return [engine_id for engine_id in found if engine_id]

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Read an engine's journal. Raises EngineDeadError, also if another took its place."""
        for pool in self.pools.values():
            for engine in pool:
                if engine.engine_id == engine_id:
                    return await engine.read_journal(engine_id, settled_seq, limit)
        raise EngineDeadError("the engine is gone")

    def residency(self, object_key: str, ref: BaseRef) -> Residency | None:
        """Residency of an adapter at the engine of its base model that could use it soonest."""
        base = self.serving(ref)
        return nearest(base.engines, object_key) if base else None

    # ---- internals ----

    def _list_models(self) -> None:
        self.models.replace(*(base.model for base in self.current))
