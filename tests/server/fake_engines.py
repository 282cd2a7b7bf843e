"""A fake of `EnginePool` for the gateway's tests."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import EngineAwayError, EngineDeadError, EngineDied
from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, RequestOutput, Residency, Welcome
from engine.wire.records import JournalRecords
from registry.ref import AdapterRef
from registry.uploads.proof import Proof
from server.pool.engines import EngineFigures, Engines
from server.pool.suspects import Suspects

MAX_MODEL_LEN = 512

Script = Callable[[AddRequest], Iterable[RequestOutput | BaseException]]


def make_welcome(epoch: int = 1) -> Welcome:
    return Welcome(
        engine_id="engine-1", epoch=epoch, base_revision="b" * 64, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8, device="fake", dtype="float32",
    )  # fmt: skip


def make_suspects() -> Suspects:
    """Suspects that have one, which two engines died of."""
    suspects = Suspects()
    for start in ("a 1", "b 1"):
        with suppress(EngineDied), suspects.watch("1234567890", "ten_9", "a"):
            raise EngineDied(start)
    return suspects


def answer_at_once(message: AddRequest) -> list[RequestOutput]:
    """Three tokens in a single output."""
    output = RequestOutput(
        request_id=message.request_id,
        seq=0,
        new_token_ids=(40, 41, 42),
        finish_reason="length",
        stop_cause="max_tokens",
        num_prompt_tokens=len(message.prompt_token_ids),
        num_completion_tokens=3,
        adapter_digest=message.adapter.digest if message.adapter else None,
        is_last=True,
    )
    return [output]


@dataclass
class FakeEngine:
    """One engine of a fake pool, which does what it is asked."""

    pool: "FakeEngines"
    name: str

    @property
    def engine_id(self) -> str:
        return f"id of {self.name}" if len(self.pool.names) > 1 else "engine-1"

    @property
    def residency(self) -> dict[str, Residency]:
        return {it.object_key: it for it in self.pool.residency.get(self.name, ())}

    async def generate(self, request: AddRequest, take: Take) -> None:
        await self.pool.generate(request, self.name, take)

    async def abort(self, request_id: str) -> None:
        await self.pool.abort(request_id)

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        self.pool.extended.append((request_id, token_lease))

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        await self.pool.prefetch(tenant_id, adapter)

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        raise EngineDeadError(f"{self.name} is a fake without a journal")


@dataclass
class FakeEngines:
    """A pool that answers by its script and records its calls.

    away: those of `names` that are gone, which only `generate` notices.
    """

    script: Script = answer_at_once
    welcome: Welcome | None = field(default_factory=make_welcome)
    is_ready: bool = True
    names: tuple[str, ...] = ("engine",)
    away: frozenset[str] = frozenset()
    asked: list[AddRequest] = field(default_factory=list)
    prefetched: list[tuple[str, AdapterRef]] = field(default_factory=list)
    pinned: list[tuple[AdapterRef, ...]] = field(default_factory=list)
    forgotten: list[tuple[str, str | None]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    extended: list[tuple[str, int]] = field(default_factory=list)
    residency: dict[str, Sequence[Residency]] = field(default_factory=dict)
    seen: list[EngineFigures] = field(default_factory=list)
    num_deaths: int = 0
    suspects: Suspects = field(default_factory=Suspects)

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        return (self.welcome,) if self.is_ready and self.welcome else ()

    @property
    def max_model_len(self) -> int:
        return self.welcome.max_model_len if self.welcome else 0

    def figures(self) -> list[EngineFigures]:
        return self.seen

    def __iter__(self) -> Iterator[FakeEngine]:
        return map(self.find, self.names)

    def find(self, name: str) -> FakeEngine:
        return FakeEngine(self, name)

    def route(self, request: AddRequest, besides: str | None = None) -> FakeEngine:
        for engine in self:
            if engine.name != besides:
                return engine
        raise EngineAwayError("no engine is ready")

    async def generate(self, request: AddRequest, name: str, take: Take) -> None:
        self.asked.append(request)
        if name in self.away:
            raise EngineAwayError("the engine leaves")
        for said in self.script(request):
            if isinstance(said, BaseException):
                raise said
            take(said)
            await asyncio.sleep(0)  # other tasks have their turn between outputs

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        self.prefetched.append((tenant_id, adapter))

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        self.pinned.append(tuple(adapters))

    async def forget_drafts(self, tenant_id: str, adapter_digest: str | None = None) -> None:
        self.forgotten.append((tenant_id, adapter_digest))

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        raise EngineDeadError("a fake proves nothing")


_: Engines = FakeEngines()
