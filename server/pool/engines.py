"""The interface by which other rooms use the engines behind a gateway."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, EngineStats, Residency, Tier, Welcome
from engine.wire.records import JournalRecords
from registry.ref import AdapterRef
from registry.uploads.proof import Proof
from server.pool.suspects import Suspects

EngineState = Literal["starting", "ready", "leaving", "of another model"]

_BY_NEARNESS: tuple[Tier, ...] = (
    "device", "loading", "host", "disk", "fetching", "failed", "remote",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures of one engine, for people, Prometheus and the autoscaler.

    stats: None while the engine is away.   num_own: this gateway's requests at the engine.
    """

    name: str
    state: EngineState
    welcome: Welcome | None
    stats: EngineStats | None
    num_own: int


class Engine(Protocol):
    """One engine. Nothing is sent to it while it is away."""

    @property
    def name(self) -> str: ...

    @property
    def engine_id(self) -> str:
        """Id of the engine; "" until the gateway has connected to it once."""

    @property
    def residency(self) -> Mapping[str, Residency]:
        """Residency of every adapter that the engine has spoken of since it started, by key."""

    async def generate(self, request: AddRequest, take: Take) -> None:
        """Have the engine answer a request; `take` gets each output.

        Cancelling this aborts the request. Raises EngineAwayError (then `route` may name another),
        EngineDeadError (EngineDied if it had the request), RequestRefused, Suspected, what `take`
        raises.
        """

    async def abort(self, request_id: str) -> None:
        """End a request; one that does not run there is no error."""

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        """Let a request generate up to `token_lease` completion tokens in all."""

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        """Load an adapter."""

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Read an engine's journal. Raises EngineDeadError, also if another took its place."""


class Engines(Protocol):
    """The engines of one base model. `EnginePool` is the one that a gateway has."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def __iter__(self) -> Iterator[Engine]: ...

    def find(self, name: str) -> Engine | None:
        """The engine that has this name now."""

    @property
    def is_ready(self) -> bool:
        """Whether an engine takes requests."""

    @property
    def num_deaths(self) -> int:
        """How often an engine has died since the gateway's start."""

    @property
    def suspects(self) -> Suspects:
        """The requests that engines may have died of."""

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        """Welcomes of the engines that take requests, which say what each serves."""

    @property
    def max_model_len(self) -> int:
        """Tokens that every engine of this model can take, or could, as long as there is none; 0
        until one has connected.
        """

    def figures(self) -> list[EngineFigures]: ...

    def route(self, request: AddRequest, besides: str | None = None) -> Engine:
        """The engine to take this request. Raises EngineAwayError when there is none.

        The request counts there once it is in `Running`.   besides: an engine that is left out.
        """

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        """Load an adapter at the engine that its next request would go to."""

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Keep exactly these adapters in an arena, each at its home, within the engines' limits."""

    async def forget_drafts(self, tenant_id: str, adapter_digest: str | None = None) -> None:
        """Have all engines forget drafts from a tenant's answers: those with an adapter, or all."""

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        """Have an engine prove an adapter by serving it. Raises EngineDeadError, and
        EngineAwayError if no engine had it.

        object_path: the adapter's canonical object, in a file that the engine can read.
        alone: whether the engine may serve nobody else meanwhile.
        """


def nearest(engines: Iterable[Engine], object_key: str) -> Residency | None:
    """Residency of an adapter at the engine that could use it soonest."""
    found = [known for it in engines if (known := it.residency.get(object_key))]
    return min(found, key=lambda known: _BY_NEARNESS.index(known.tier), default=None)
