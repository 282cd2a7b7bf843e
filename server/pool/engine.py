"""One engine of the pool, as this gateway sees it: its client, and the figures for routing."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from engine.client import EngineClient
from engine.messages import EngineStats, Tier
from registry.ref import AdapterRef
from server.pool.files import Member
from server.pool.load_costs import LoadCosts
from server.pool.router import EngineView

EngineState = Literal["starting", "ready", "leaving", "of another model"]

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


class PooledEngine:
    """An engine, its client and its figures.

    costs: costs of loads, shared by the pool.   num_own: number of this gateway's requests that an
    engine has, by the engine's name.
    """

    def __init__(
        self,
        member: Member,
        client: EngineClient,
        base_revision: str,
        costs: LoadCosts,
        num_own: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member = member
        self.client = client
        self._base_revision = base_revision
        self._costs = costs
        self._num_own = num_own
        self._clock = clock
        self._request_s = _FIRST_REQUEST_S
        self._expected: OrderedDict[str, float] = OrderedDict()
        self._seen: EngineStats | None = None
        self._num_others = 0.0
        self._num_deaths = 0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def engine_id(self) -> str | None:
        """Id of the engine; None until the gateway has connected to the engine once."""
        return self.client.welcome.engine_id if self.client.welcome else None

    @property
    def state(self) -> EngineState:
        welcome, stats = self.client.welcome, self.client.stats
        if welcome is None or not self.client.is_ready:
            return "starting"
        if welcome.base_revision != self._base_revision:
            return "of another model"
        return "leaving" if stats is not None and stats.is_leaving else "ready"

    @property
    def num_requests(self) -> float:
        """Requests at the engine: this gateway's exactly, other gateways' as an average."""
        return self._num_own(self.name) + max(0.0, self._num_others)

    def is_idle_but_for(self, num_answers: int) -> bool:
        """Whether it serves nobody's requests, of this gateway's not more than these answers."""
        stats = self.client.stats
        others = stats.running + stats.waiting if stats else 0
        return not others and self._num_own(self.name) <= num_answers

    def look(self) -> None:
        """Take in the engine's figures if they are new."""
        stats = self.client.stats
        if stats is self._seen:
            return
        if stats is None:
            self._num_others = 0.0
        else:
            found = stats.running + stats.waiting - self._num_own(self.name)
            self._num_others += (found - self._num_others) * _NEW_OTHERS
            self._costs.note(self._seen, stats)
        self._seen = stats

    def take_death(self) -> bool:
        """Whether the engine died since the last call, so that its caches are empty now."""
        before, self._num_deaths = self._num_deaths, self.client.num_deaths
        return self._num_deaths > before

    def note_request(self, seconds: float) -> None:
        """Note that a request has ended here, after this many seconds."""
        self._request_s += (seconds - self._request_s) * _NEW_SAMPLE

    def expect(self, adapter: AdapterRef) -> None:
        """Note that the engine was asked to load an adapter."""
        self._expected[adapter.object_key] = self._clock() + _EXPECTED_S
        self._expected.move_to_end(adapter.object_key)
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

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
            load_s=self._costs.load_s(self._tier(adapter), adapter.size_bytes) if adapter else 0.0,
            is_coming=adapter is not None and self._is_coming(adapter),
            prefill_s=num_tokens / speed,
        )

    def _tier(self, adapter: AdapterRef) -> Tier:
        found = self.client.residency.get(adapter.object_key)
        return found.tier if found else "remote"

    def _is_coming(self, adapter: AdapterRef) -> bool:
        if self._tier(adapter) in ("fetching", "loading"):
            return True
        return self._expected.get(adapter.object_key, 0.0) > self._clock()
