"""What the other rooms may ask of the engines behind a gateway."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.messages import AddRequest, EngineStats, RequestOutput, Residency, Welcome
from engine.records import JournalRecords
from registry.proof import Proof
from registry.ref import AdapterRef
from server.pool.engine import EngineState


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine, for people, Prometheus and the autoscaler. stats: None while it is away."""

    name: str
    state: EngineState
    welcome: Welcome | None
    stats: EngineStats | None
    num_own: int


class Engines(Protocol):
    """The engines, each by its name. `EnginePool` is the one that a gateway has."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    # ---- what there is to know of them ----

    @property
    def is_ready(self) -> bool:
        """Whether one of them takes requests."""

    @property
    def num_deaths(self) -> int:
        """How often an engine has died since the gateway's start."""

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        """What those serve that take requests, by name."""

    @property
    def max_model_len(self) -> int:
        """Tokens that all of this model can take; 0 while none has been there."""

    def figures(self) -> list[EngineFigures]: ...

    def engine_ids(self) -> list[str]:
        """Whose journals there are, of all that have been there and are not gone for good."""

    def residency(self, object_key: str, name: str | None = None) -> Residency | None:
        """Where an adapter is: at this engine, or where it is nearest to being used."""

    def all_residency(self) -> list[tuple[str, Residency]]:
        """Every adapter that an engine has spoken of since it started, with the engine's name."""

    # ---- requests ----

    def route(self, request: AddRequest, besides: str | None = None) -> str:
        """The name of the engine to take this request. Raises EngineAwayError when there is none.

        It counts as being there once it is among the running ones.   besides: another than this.
        """

    def engine_id(self, name: str) -> str:
        """The id of the engine that has this name now. Raises EngineAwayError if there is none."""

    def generate(self, request: AddRequest, name: str) -> AsyncGenerator[RequestOutput, None]:
        """At the engine that `route` named. Raises EngineAwayError (then `route` may name another),
        EngineDeadError, RequestRefused, Quarantined.
        """

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs; nothing where it does not."""

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        """Let a request come to so many completion tokens in all."""

    # ---- adapters ----

    async def prefetch(self, tenant_id: str, adapter: AdapterRef, name: str | None = None) -> None:
        """At this engine, or at the one that its next request would go to."""

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Keep exactly these in an arena, each at its home, as far as the engines' limits go."""

    async def prove(self, adapter: AdapterRef, object_path: Path) -> Proof:
        """What an engine finds out about an adapter by serving it. Raises EngineDeadError.

        object_path: its canonical object, in a file that the engine can read.
        """

    # ---- journals ----

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Raises EngineDeadError, also when another engine has taken that one's place."""
