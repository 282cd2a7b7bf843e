"""The pool of engines of one base model, and the choice of an engine for each request."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from engine.errors import EngineAwayError
from engine.wire.client import EngineClient
from engine.wire.messages import (
    AddRequest,
    ForgetDrafts,
    LeaseLow,
    PinAdapters,
    TenantService,
    Welcome,
)
from registry.ref import AdapterRef
from registry.uploads.proof import Proof
from server.pool import router
from server.pool.control_files import Member
from server.pool.engine import PooledEngine
from server.pool.engines import Engine, EngineFigures
from server.pool.load_costs import LoadCosts
from server.pool.members import Members
from server.pool.prefix_table import PrefixTable, marks_of
from server.pool.service_exchange import ServiceExchange
from server.pool.suspects import Suspects

TURN_S = 0.25
"""Seconds between polls of the list of engines, and of the service that they gave."""


Connect = Callable[
    [Member, Callable[[LeaseLow], None], Callable[[TenantService], None]], EngineClient
]
"""Makes the client of a member, which calls these as `on_lease_low` and `on_service`."""


class EnginePool:
    """Connects to the engines that `members` returns, and chooses among them. See `Engines`.

    num_own: number of this gateway's answers that an engine has to give, by the engine's name.
    on_lease_low: called as that of an EngineClient, with the engine.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        connect: Connect,
        base_revision: str,
        num_own: Callable[[str], int],
        on_lease_low: Callable[[Engine, LeaseLow], None],
    ) -> None:
        self._base_revision = base_revision
        self._num_own = num_own
        self._on_lease_low = on_lease_low
        self._connect = connect
        self._members = Members(members, self._engine_of)
        self._costs = LoadCosts()
        self._prefixes = PrefixTable()
        self.suspects = Suspects()
        self._service = ServiceExchange()
        self._last_max_model_len = 0
        self._turning: asyncio.Task[None] | None = None

    # ---- members ----

    async def start(self) -> None:
        await self._members.follow()
        self._turning = asyncio.create_task(self._turn())

    async def close(self) -> None:
        if self._turning:
            self._turning.cancel()
            await asyncio.gather(self._turning, return_exceptions=True)
        await self._members.close()

    def __iter__(self) -> Iterator[PooledEngine]:
        return iter(self._members)

    def find(self, name: str) -> PooledEngine | None:
        return self._members.find(name)

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self._last_max_model_len = self.max_model_len
            gone = await self._members.follow()
            for engine in self._members:
                engine.look()
            died = [engine.name for engine in self._members if engine.take_death()]
            for name in gone + died:
                self._prefixes.forget_engine(name)
            await self._service.pass_on(list(self._members))

    def _engine_of(self, member: Member) -> PooledEngine:
        def on_lease_low(low: LeaseLow) -> None:
            self._on_lease_low(engine, low)

        engine = PooledEngine(
            member,
            self._connect(member, on_lease_low, self._service.note),
            self._base_revision,
            self._num_own,
            self._costs,
            self.suspects,
            is_only=lambda: self._members.ready == [engine],
        )
        return engine

    # ---- state and figures of the engines ----

    @property
    def is_ready(self) -> bool:
        return bool(self._members.ready)

    @property
    def num_deaths(self) -> int:
        return self._members.num_deaths

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        return tuple(it.client.welcome for it in self._members.ready if it.client.welcome)

    @property
    def max_model_len(self) -> int:
        known = (engine.client.welcome for engine in self._members)
        ours = [it for it in known if it and it.base_revision == self._base_revision]
        lengths = [welcome.max_model_len for welcome in ours if welcome.max_model_len]
        return min(lengths, default=self._last_max_model_len)

    def figures(self) -> list[EngineFigures]:
        return sorted((it.figures() for it in self._members), key=lambda figures: figures.name)

    # ---- choice of an engine ----

    def route(self, request: AddRequest, besides: str | None = None) -> PooledEngine:
        ready = [engine for engine in self._members.ready if engine.name != besides]
        ready = [it for it in ready if it.name != self.suspects.trial] or ready
        if not ready:
            raise EngineAwayError("no engine is ready")
        if len(ready) == 1 or self.suspects.has(request):
            return min(ready, key=lambda engine: engine.num_requests)
        marks = marks_of(request)
        cached, num_tokens = self._prefixes.cached_tokens(marks), len(request.prompt_token_ids)
        views = [it.view(request.adapter, num_tokens - cached.get(it.name, 0)) for it in ready]
        name = router.route(views, _key(request, marks)).name
        self._prefixes.note(name, marks)
        return next(engine for engine in ready if engine.name == name)

    def _place(self, adapter: AdapterRef) -> PooledEngine | None:
        """The engine that a request on this adapter would go to now."""
        views = [engine.view(adapter) for engine in self._members.ready]
        return self.find(router.route(views, adapter.object_key).name) if views else None

    # ---- adapters ----

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        if engine := self._place(adapter):
            await engine.prefetch(tenant_id, adapter)

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        ready = self._members.ready
        names = [engine.name for engine in ready]
        homes = {it: router.home(names, it.object_key) for it in adapters} if ready else {}
        for engine in ready:
            here = tuple(adapter for adapter, home in homes.items() if home == engine.name)
            await engine.client.tell(PinAdapters(adapters=here))

    async def forget_drafts(self, tenant_id: str, adapter_digest: str | None = None) -> None:
        message = ForgetDrafts(tenant_id=tenant_id, adapter_digest=adapter_digest)
        for engine in self._members:
            await engine.client.tell(message)

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        engine = self._place(adapter)
        if alone:
            engine = min(self._members.ready, key=lambda it: it.num_requests, default=None)
        if engine is None:
            raise EngineAwayError("no engine is ready")
        return await engine.client.prove(adapter, object_path, alone=alone)


def _key(request: AddRequest, marks: Sequence[bytes]) -> str:
    """A key that is equal for requests that should go to one engine."""
    if request.adapter:
        return request.adapter.object_key
    return marks[0].hex() if marks else request.request_id
