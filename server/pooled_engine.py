"""One engine of the pool, as this gateway sees it: its client, and what routing wants to know."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from engine.client import EngineClient
from engine.messages import Tier, TierStats
from registry.ref import AdapterRef
from server.pool_files import Member
from server.router import EngineView

EngineState = Literal["starting", "ready", "leaving", "of another model"]

_FIRST_REQUEST_S = 1.0
_FIRST_TOKENS_PER_S = 1000.0
"""Guesses, until an engine has been seen at work."""
_NEW_SAMPLE = 0.1
_EXPECTED_S = 5.0
"""How long a load that was asked for is believed in before the engine says anything of it."""
_MAX_EXPECTED = 1000

_Move = Literal["disk", "host", "device"]
_MOVES: dict[Tier, tuple[_Move, ...]] = {
    "device": (),
    "loading": ("device",),
    "host": ("device",),
    "disk": ("host", "device"),
    "fetching": ("disk", "host", "device"),
    "remote": ("disk", "host", "device"),
    "failed": ("disk", "host", "device"),
}
"""What is still to be done for an adapter, by where it is: each is a tier that it comes into."""
_FIRST_GUESS_S_PER_BYTE: dict[_Move, float] = {"disk": 5e-9, "host": 1e-9, "device": 1e-9}


class PooledEngine:
    """num_own: of this gateway's requests, those that are with an engine, by its name."""

    def __init__(
        self,
        member: Member,
        client: EngineClient,
        base_revision: str,
        num_own: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member = member
        self.client = client
        self._base_revision = base_revision
        self._num_own = num_own
        self._clock = clock
        self._request_s = _FIRST_REQUEST_S
        self._expected: OrderedDict[str, float] = OrderedDict()
        self._seen: object = None
        self._num_others = 0
        self._num_deaths = 0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def engine_id(self) -> str | None:
        """None until it has been there once."""
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
    def num_requests(self) -> int:
        """Ours, as of now, and those of other gateways, as of the engine's latest figures."""
        own, stats = self._num_own(self.name), self.client.stats
        if stats is not None and stats is not self._seen:
            self._seen = stats
            self._num_others = max(0, stats.running + stats.waiting - own)
        return own + (self._num_others if stats else 0)

    def take_death(self) -> bool:
        """Whether it died since the last call: its caches are empty now."""
        before, self._num_deaths = self._num_deaths, self.client.num_deaths
        return self._num_deaths > before

    def note_request(self, seconds: float) -> None:
        """One has come to its end here."""
        self._request_s += (seconds - self._request_s) * _NEW_SAMPLE

    def expect(self, adapter: AdapterRef) -> None:
        """It was asked to load it."""
        self._expected[adapter.object_key] = self._clock() + _EXPECTED_S
        self._expected.move_to_end(adapter.object_key)
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def view(self, adapter: AdapterRef | None, num_tokens: int = 0) -> EngineView:
        """For a request on this adapter with so many tokens to compute here."""
        welcome, stats = self.client.welcome, self.client.stats
        assert welcome is not None
        speed = (stats.prefill_tokens_per_s if stats else 0.0) or _FIRST_TOKENS_PER_S
        return EngineView(
            name=self.name,
            num_requests=self.num_requests,
            seats=welcome.max_num_seqs,
            request_s=self._request_s,
            load_s=self._load_s(adapter) if adapter else 0.0,
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

    def _load_s(self, adapter: AdapterRef) -> float:
        stats = self.client.stats
        tiers = {tier.tier: tier for tier in stats.tiers} if stats else {}
        moves = _MOVES[self._tier(adapter)]
        return adapter.size_bytes * sum(_s_per_byte(move, tiers.get(move)) for move in moves)


def _s_per_byte(move: _Move, seen: TierStats | None) -> float:
    """Of the loads into this tier so far."""
    if seen is None or not seen.load_bytes:
        return _FIRST_GUESS_S_PER_BYTE[move]
    return seen.load_seconds / seen.load_bytes
