"""The interface by which other rooms use the engines behind a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.delivery import Take
from engine.messages import AddRequest, EngineStats, Residency, Welcome
from engine.records import JournalRecords
from registry.proof import Proof
from registry.ref import AdapterRef
from server.pool.engine import EngineState
from server.pool.suspects import Suspects


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


class Engines(Protocol):
    """The engines, each by its name. `EnginePool` is the one that a gateway has."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    # ---- state and figures of the engines ----

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
        """Tokens that every engine of this model can take; 0 until one has connected."""

    def figures(self) -> list[EngineFigures]: ...

    def engine_ids(self) -> list[str]:
        """Ids of the engines whose journals can be read: all that have connected at least once."""

    def residency(self, object_key: str, name: str | None = None) -> Residency | None:
        """Residency of an adapter at this engine, or at the engine that could use it soonest."""

    def all_residency(self) -> list[tuple[str, Residency]]:
        """Every adapter that an engine has spoken of since it started, with the engine's name."""

    # ---- requests ----

    def route(self, request: AddRequest, besides: str | None = None) -> str:
        """The name of the engine to take this request. Raises EngineAwayError when there is none.

        The request counts there once it is in `Running`.   besides: an engine that is left out.
        """

    def engine_id(self, name: str) -> str:
        """The id of the engine that has this name now. Raises EngineAwayError if there is none."""

    async def generate(self, request: AddRequest, name: str, take: Take) -> None:
        """Have the engine that `route` named answer a request; `take` gets each output.

        Cancelling this aborts the request. Raises EngineAwayError (then `route` may name another),
        EngineDeadError, RequestRefused, Suspected, what `take` raises.
        """

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs; a request that does not run is no error."""

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        """Let a request generate up to `token_lease` completion tokens in all."""

    # ---- adapters ----

    async def prefetch(self, tenant_id: str, adapter: AdapterRef, name: str | None = None) -> None:
        """Load an adapter at this engine, or at the one that its next request would go to."""

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Keep exactly these adapters in an arena, each at its home, within the engines' limits."""

    async def forget_drafts(self, tenant_id: str, adapter_digest: str | None = None) -> None:
        """Have all engines forget drafts from a tenant's answers: those with an adapter, or all."""

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        """Have an engine prove an adapter by serving it. Raises EngineDeadError.

        object_path: the adapter's canonical object, in a file that the engine can read.
        alone: whether the engine may serve nobody else meanwhile.
        """

    # ---- journals ----

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Read an engine's journal. Raises EngineDeadError, also if another took its place."""
