"""One engine of the pool, as this gateway sees it: its client, and the figures for routing."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.errors import EngineProves
from engine.wire.client import EngineClient
from engine.wire.delivery import Take
from engine.wire.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    ExtendLease,
    Prefetch,
    RequestOutput,
    Residency,
    Tier,
)
from engine.wire.records import JournalRecords
from registry.ref import AdapterRef
from server.pool.control_files import Member
from server.pool.engines import EngineFigures, EngineState
from server.pool.load_costs import LoadCosts
from server.pool.router import EngineView
from server.pool.suspects import RETRY_S, Suspected, Suspects, fingerprint

_FIRST_REQUEST_S = 1.0
_FIRST_TOKENS_PER_S = 1000.0
"""The two guesses for an engine that has not been seen at work yet."""
_NEW_SAMPLE = 0.1
_EXPECTED_S = 5.0
"""Seconds for which a requested load counts as under way if the engine does not report it."""
_MAX_EXPECTED = 1000

_NEW_OTHERS = 0.1
"""Weight of a new figure in the average of other gateways' requests. It is low because figures are
of different moments, and gateways that all believed in the same dip would all fill it."""
_ALONE_S = 0.1
"""Seconds between looks at an engine that serves, or is to serve, one alone."""
_SERVED = frozenset({"eos", "stop_string", "stop_token", "max_tokens", "max_model_len", "budget"})
"""Causes by which an engine ends a request that it has served to the end."""


@dataclass(slots=True, eq=False)
class PooledEngine:
    """An engine, its client and its figures. See `Engine`.

    num_own: number of this gateway's answers that an engine has to give, by the engine's name.
    costs: costs of loads, shared by the pool, as `suspects` are.
    is_only: whether no other engine takes requests.
    """

    member: Member
    client: EngineClient
    base_revision: str
    num_own: Callable[[str], int]
    costs: LoadCosts
    suspects: Suspects
    is_only: Callable[[], bool]
    _request_s: float = _FIRST_REQUEST_S
    _expected: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _seen: EngineStats | None = None
    _num_others: float = 0.0
    _num_deaths: int = 0

    # ---- what is said to it ----

    async def generate(self, request: AddRequest, take: Take) -> None:
        mark = fingerprint(request)
        started = time.monotonic()
        deadline = started + request.first_token_timeout_s

        def note_and_take(output: RequestOutput) -> None:
            if output.is_last:
                self._request_s += (time.monotonic() - started - self._request_s) * _NEW_SAMPLE
                if output.stop_cause in _SERVED:
                    self.suspects.clear(mark)
            take(output)

        with self.suspects.watch(mark, request.tenant_id, self.name) as is_tried:
            if is_tried:
                await self._wait_alone(request.num_answers, deadline)
            while True:
                try:
                    return await self.client.generate(request, note_and_take)
                except EngineProves:  # the only engine may first end a proof that it serves alone
                    if not self.is_only() or time.monotonic() >= deadline:
                        raise
                await asyncio.sleep(_ALONE_S)

    async def _wait_alone(self, num_answers: int, deadline: float) -> None:
        """Wait until it serves nobody's requests, and of this gateway's not more than these
        answers. Raises Suspected if that takes too long.
        """
        while True:
            stats = self.client.stats
            others = stats.running + stats.waiting if stats else 0
            if not others and self.num_own(self.name) <= num_answers:
                break
            if time.monotonic() >= deadline:
                raise Suspected(RETRY_S)
            await asyncio.sleep(_ALONE_S)
        self.suspects.is_alone = True

    async def abort(self, request_id: str) -> None:
        await self.client.tell(AbortRequests(request_ids=(request_id,)))

    async def extend_lease(self, request_id: str, token_lease: int) -> None:
        await self.client.tell(ExtendLease(request_id=request_id, token_lease=token_lease))

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        self._expected[adapter.object_key] = time.monotonic() + _EXPECTED_S
        self._expected.move_to_end(adapter.object_key)
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)
        await self.client.tell(Prefetch(tenant_id=tenant_id, adapter=adapter))

    async def read_journal(self, engine_id: str, settled_seq: int, limit: int) -> JournalRecords:
        return await self.client.read_journal(engine_id, settled_seq, limit)

    # ---- what is known of it ----

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def engine_id(self) -> str:
        return self.client.welcome.engine_id if self.client.welcome else ""

    @property
    def residency(self) -> Mapping[str, Residency]:
        return self.client.residency

    @property
    def state(self) -> EngineState:
        welcome, stats = self.client.welcome, self.client.stats
        if welcome is None or not self.client.is_ready:
            return "starting"
        if welcome.base_revision != self.base_revision:
            return "of another model"
        return "leaving" if stats is not None and stats.is_leaving else "ready"

    @property
    def num_requests(self) -> float:
        """Requests at the engine: this gateway's exactly, other gateways' as an average."""
        return self.num_own(self.name) + max(0.0, self._num_others)

    def figures(self) -> EngineFigures:
        client = self.client
        stats = client.stats if client.is_ready else None
        return EngineFigures(self.name, self.state, client.welcome, stats, self.num_own(self.name))

    def look(self) -> None:
        """Take in the engine's figures if they are new."""
        stats = self.client.stats
        if stats is self._seen:
            return
        if stats is None:
            self._num_others = 0.0
        else:
            found = stats.running + stats.waiting - self.num_own(self.name)
            self._num_others += (found - self._num_others) * _NEW_OTHERS
            self.costs.note(self._seen, stats)
        self._seen = stats

    def take_death(self) -> bool:
        """Whether the engine died since the last call, so that its caches are empty now."""
        before, self._num_deaths = self._num_deaths, self.client.num_deaths
        return self._num_deaths > before

    def view(self, adapter: AdapterRef | None, num_tokens: int = 0) -> EngineView:
        """The engine as routing sees it, for a request on this adapter.

        num_tokens: prompt tokens that the engine would have to compute.
        """
        self.look()
        welcome, stats = self.client.welcome, self.client.stats
        assert welcome is not None
        speed = (stats.prefill_tokens_per_s if stats else 0.0) or _FIRST_TOKENS_PER_S
        return EngineView(
            name=self.name,
            num_requests=self.num_requests,
            seats=welcome.max_num_seqs,
            request_s=self._request_s,
            load_s=self.costs.load_s(self._tier(adapter), adapter.size_bytes) if adapter else 0.0,
            is_coming=adapter is not None and self._is_coming(adapter),
            prefill_s=num_tokens / speed,
        )

    def _tier(self, adapter: AdapterRef) -> Tier:
        found = self.client.residency.get(adapter.object_key)
        return found.tier if found else "remote"

    def _is_coming(self, adapter: AdapterRef) -> bool:
        if self._tier(adapter) in ("fetching", "loading"):
            return True
        return self._expected.get(adapter.object_key, 0.0) > time.monotonic()
