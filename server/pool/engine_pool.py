"""The pool of engines behind this gateway: its members, the choice of an engine for each request,
and the messages between gateway and engines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.client import EngineClient
from engine.delivery import Take
from engine.endpoint import Endpoint
from engine.errors import EngineAwayError, EngineDeadError, EngineProves
from engine.messages import (
    AddRequest,
    ForgetDrafts,
    LeaseLow,
    PinAdapters,
    Prefetch,
    RequestOutput,
    Residency,
    Tier,
    Welcome,
)
from engine.records import JournalRecords
from registry.proof import Proof
from registry.ref import AdapterRef
from server.pool import router
from server.pool.engine import PooledEngine
from server.pool.engines import EngineFigures
from server.pool.files import Member
from server.pool.load_costs import LoadCosts
from server.pool.prefix_table import PrefixTable, marks_of
from server.pool.running import Running
from server.pool.service_exchange import ServiceExchange
from server.pool.suspects import RETRY_S, Suspected, Suspects, fingerprint

logger = logging.getLogger(__name__)

TURN_S = 0.25
"""Seconds between polls of the list of engines, and of the service that they gave."""
_ALONE_S = 0.1
"""Seconds between looks at an engine that serves, or is to serve, one alone."""
_SERVED = frozenset({"eos", "stop_string", "stop_token", "max_tokens", "max_model_len", "budget"})
"""Causes by which an engine ends a request that it has served to the end."""
_BY_NEARNESS: tuple[Tier, ...] = (
    "device", "loading", "host", "disk", "fetching", "failed", "remote",
)  # fmt: skip


class EnginePool:
    """Connects to the engines that `members` returns, and speaks to each. See `Engines`.

    client_key: secret key of this pool's gateways, for engines on other machines.
    running: this gateway's requests, with the engines that have them.
    on_end, on_lease_low: called as those of an EngineClient.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        client_key: str,
        base_revision: str,
        running: Running,
        on_end: Callable[[], None],
        on_lease_low: Callable[[LeaseLow], None],
    ) -> None:
        self._members = members
        self._client_key = client_key
        self._base_revision = base_revision
        self._running = running
        self._on_end = on_end
        self._on_lease_low = on_lease_low
        self._engines: dict[str, PooledEngine] = {}
        self._costs = LoadCosts()
        self._prefixes = PrefixTable()
        self.suspects = Suspects()
        self._service = ServiceExchange()
        self._num_past_deaths = self._last_max_model_len = 0
        self._turning: asyncio.Task[None] | None = None

    # ---- membership ----

    async def start(self) -> None:
        await self._follow()
        self._turning = asyncio.create_task(self._turn())

    async def close(self) -> None:
        if self._turning:
            self._turning.cancel()
            await asyncio.gather(self._turning, return_exceptions=True)
        for name in list(self._engines):
            await self._part(name)

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            await self._follow()
            for engine in self._engines.values():
                engine.look()
                if engine.take_death():
                    self._prefixes.forget_engine(engine.name)
            await self._service.pass_on(list(self._engines.values()))

    async def _follow(self) -> None:
        """Connect to new members and disconnect from former ones; a moved engine counts as both."""
        self._last_max_model_len = self.max_model_len
        members = {member.name: member for member in self._members()}
        for name, engine in list(self._engines.items()):
            if members.get(name) != engine.member:
                await self._part(name)
        for name in members.keys() - self._engines.keys():
            await self._meet(members[name])

    async def _meet(self, member: Member) -> None:
        endpoint = Endpoint(member.address, member.server_key, self._client_key)
        client = EngineClient(endpoint, self._on_end, self._on_lease_low, self._service.note)
        self._engines[member.name] = PooledEngine(
            member, client, self._base_revision, self._costs, self._running.num_at
        )
        await client.start()

    async def _part(self, name: str) -> None:
        engine = self._engines.pop(name)
        self._prefixes.forget_engine(name)
        await engine.client.close()
        self._num_past_deaths += engine.client.num_deaths

    # ---- state and figures of the engines ----

    @property
    def is_ready(self) -> bool:
        """Whether an engine takes requests."""
        return any(engine.state == "ready" for engine in self._engines.values())

    @property
    def num_deaths(self) -> int:
        deaths = (engine.client.num_deaths for engine in self._engines.values())
        return self._num_past_deaths + sum(deaths)

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        """Welcomes of the engines that take requests, which say what each serves."""
        return tuple(e.client.welcome for e in self._ready() if e.client.welcome)

    @property
    def max_model_len(self) -> int:
        """Tokens that every engine of this model can take, or could, as long as there is none; 0
        until one has connected.
        """
        known = [e.client.welcome for e in self._engines.values() if e.client.welcome]
        ours = [welcome for welcome in known if welcome.base_revision == self._base_revision]
        lengths = [welcome.max_model_len for welcome in ours if welcome.max_model_len]
        return min(lengths, default=self._last_max_model_len)

    def figures(self) -> list[EngineFigures]:
        return [
            EngineFigures(
                engine.name,
                engine.state,
                engine.client.welcome,
                engine.client.stats if engine.client.is_ready else None,
                self._running.num_at(engine.name),
            )
            for engine in sorted(self._engines.values(), key=lambda engine: engine.name)
        ]

    def engine_ids(self) -> list[str]:
        """Ids of the engines whose journals can be read: all that have connected at least once."""
        return [engine.engine_id for engine in self._engines.values() if engine.engine_id]

    def residency(self, object_key: str, name: str | None = None) -> Residency | None:
        """Residency of an adapter at this engine, or at the engine that could use it soonest."""
        asked = self._engines.values() if name is None else [self._engines[name]]
        found = [engine.client.residency.get(object_key) for engine in asked]
        known = [residency for residency in found if residency]
        return min(known, key=lambda found: _BY_NEARNESS.index(found.tier), default=None)

    def all_residency(self) -> list[tuple[str, Residency]]:
        """Every adapter that an engine has spoken of since it started, with the engine's name."""
        return [
            (engine.name, residency)
            for engine in self._engines.values()
            for residency in engine.client.residency.values()
        ]

    # ---- requests ----

    def route(self, request: AddRequest, besides: str | None = None) -> str:
        """The name of the engine to take this request. Raises EngineAwayError when there is none.

        The request counts there once it is in `running`.   besides: an engine that is left out.
        """
        ready = [engine for engine in self._ready() if engine.name != besides]
        ready = [it for it in ready if it.name != self.suspects.trial] or ready
        if len(ready) < 2 or self.suspects.has(request):
            if not ready:
                raise EngineAwayError("no engine is ready")
            return min(ready, key=lambda engine: engine.num_requests).name
        marks = marks_of(request)
        cached, num_tokens = self._prefixes.cached_tokens(marks), len(request.prompt_token_ids)
        views = [
            engine.view(request.adapter, num_tokens - cached.get(engine.name, 0))
            for engine in ready
        ]
        name = router.choose(_key(request, marks), views).name
        self._prefixes.note(name, marks)
        return name

    def engine_id(self, name: str) -> str:
        """Id of the engine that has this name now. Raises EngineAwayError when there is none."""
        engine = self._engines.get(name)
        if engine is None or engine.engine_id is None:
            raise EngineAwayError("the engine is gone")
        return engine.engine_id

    async def generate(self, request: AddRequest, name: str, take: Take) -> None:
        """Have the engine that `route` named answer a request; `take` gets each output.

        Raises EngineAwayError (then `route` may name another), EngineDeadError (EngineDied if it
        had the request), RequestRefused, Suspected, what `take` raises.
        """
        mark = fingerprint(request)
        engine = self._engines.get(name)
        if engine is None:
            raise EngineAwayError("the engine is gone")
        started = time.monotonic()

        def note_and_take(output: RequestOutput) -> None:
            if output.is_last:
                engine.note_request(time.monotonic() - started)
                if output.stop_cause in _SERVED:
                    self.suspects.clear(mark)
            take(output)

        with self.suspects.watch(mark, request.tenant_id, name) as is_tried:
            if is_tried:
                await self._wait_alone(request, engine)
            await self._generate(engine.client, request, note_and_take)

    async def _wait_alone(self, request: AddRequest, engine: PooledEngine) -> None:
        """Wait until an engine serves nobody else. Raises Suspected if that takes too long."""
        deadline = time.monotonic() + request.first_token_timeout_s
        while not engine.is_idle_but_for(request.num_answers):
            if time.monotonic() >= deadline:
                raise Suspected(RETRY_S)
            await asyncio.sleep(_ALONE_S)
        self.suspects.is_alone = True

    async def _generate(self, client: EngineClient, request: AddRequest, take: Take) -> None:
        """Have an engine answer; the only one may first end a proof that it serves alone."""
        deadline = time.monotonic() + request.first_token_timeout_s
        while True:
            try:
                return await client.generate(request, take)
            except EngineProves:
                if len(self._ready()) > 1 or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_ALONE_S)

    async def abort(self, request_id: str) -> None:
        if engine := self._engine_of(request_id):
            await engine.client.abort(request_id)

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        if engine := self._engine_of(request_id):
            await engine.client.extend_lease(request_id, token_lease)

    # ---- adapters ----

    async def prefetch(self, tenant_id: str, adapter: AdapterRef, name: str | None = None) -> None:
        """Load an adapter at this engine, or at the one that its next request would go to."""
        engine = self._engines.get(name) if name else self._place(adapter)
        if engine is not None:
            engine.expect(adapter)
            await engine.client.tell(Prefetch(tenant_id=tenant_id, adapter=adapter))

    async def pin(self, adapters: Sequence[AdapterRef]) -> None:
        """Keep exactly these adapters in an arena, each at its home, within the engines' limits."""
        ready = self._ready()
        homes: dict[str, list[AdapterRef]] = {engine.name: [] for engine in ready}
        for adapter in adapters if homes else ():
            homes[max(homes, key=lambda name: router.rank(adapter.object_key, name))].append(
                adapter
            )
        for engine in ready:
            await engine.client.tell(PinAdapters(adapters=tuple(homes[engine.name])))

    async def forget_drafts(self, tenant_id: str, adapter_digest: str | None = None) -> None:
        """Have all engines forget drafts from a tenant's answers: those with an adapter, or all."""
        message = ForgetDrafts(tenant_id=tenant_id, adapter_digest=adapter_digest)
        for engine in list(self._engines.values()):
            await engine.client.tell(message)

    async def prove(self, adapter: AdapterRef, object_path: Path, *, alone: bool) -> Proof:
        """Have an engine prove an adapter by serving it. Raises EngineDeadError, and
        EngineAwayError if no engine had it.

        object_path: the adapter's canonical object, in a file that the engine can read.
        alone: whether the engine may serve nobody else meanwhile.
        """
        engine = self._place(adapter)
        if alone:
            engine = min(self._ready(), key=lambda e: e.num_requests, default=None)
        if engine is None:
            raise EngineAwayError("no engine is ready")
        return await engine.client.prove(adapter, object_path, alone=alone)

    # ---- journals ----

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        """Read an engine's journal. Raises EngineDeadError, also if another engine replaced it."""
        for engine in self._engines.values():
            if engine.engine_id == engine_id:
                return await engine.client.read_journal(engine_id, settled_seq, limit)
        raise EngineDeadError("the engine is gone")

    # ---- choice of an engine ----

    def _ready(self) -> list[PooledEngine]:
        return [engine for engine in self._engines.values() if engine.state == "ready"]

    def _engine_of(self, request_id: str) -> PooledEngine | None:
        request = self._running.find(request_id)
        return self._engines.get(request.engine) if request else None

    def _place(self, adapter: AdapterRef) -> PooledEngine | None:
        """The engine that a request on this adapter would go to now."""
        ready = self._ready()
        if not ready:
            return None
        views = [engine.view(adapter) for engine in ready]
        return self._engines[router.choose(adapter.object_key, views).name]


def _key(request: AddRequest, marks: Sequence[bytes]) -> str:
    """A key that is equal for requests that should go to one engine."""
    if request.adapter:
        return request.adapter.object_key
    return marks[0].hex() if marks else request.request_id
