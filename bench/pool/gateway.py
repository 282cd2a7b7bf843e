"""A modelled gateway: the product's own view of each engine, from the messages received so far."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import cast

from bench.pool.clock import Clock
from bench.pool.engine import Engine
from bench.pool.policies import Policy
from engine.client import EngineClient
from engine.messages import EngineStats, Residency, TierStats, Welcome
from registry.ref import AdapterRef
from server.pool.engine import PooledEngine
from server.pool.files import Member
from server.pool.load_costs import LoadCosts
from server.pool.prefix_table import CHUNK_TOKENS, PrefixTable

_NO_FIGURES = EngineStats(
    running=0,
    waiting=0,
    batch_requests=0,
    batch_tokens=0,
    batch_adapters=0,
    free_slabs=0,
    total_slabs=0,
    adapter_slabs=0,
    steps=0,
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=0,
    preemptions=0,
    swapped=0,
    prefix_slabs=0,
    prefix_evictions=0,
    prefill_tokens_per_s=0.0,
    copy_bytes_per_s=0.0,
    adapter_evictions=0,
    pinned_slabs=0,
    unsettled_records=0,
)


class Heard:
    """Stands in for an `EngineClient`: the state that an engine has reported, late or not."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.stats: EngineStats | None = None
        self.residency: dict[str, Residency] = {}
        self.num_deaths = 0
        self.is_ready = True
        self.welcome = Welcome(
            engine_id=name,
            epoch=1,
            base_revision="",
            max_model_len=0,
            max_num_seqs=engine.spec.seats,
            device="",
            dtype="",
        )


def figures_of(engine: Engine) -> EngineStats:
    """Return the figures that an engine reports four times a second and that routing uses."""
    tiers = (
        TierStats(tier="device", load_bytes=engine.copied_bytes, load_seconds=engine.copied_s),
        # Reading and copying are one operation; its time is counted above.
        TierStats(tier="host", load_bytes=engine.copied_bytes),
        TierStats(tier="disk", load_bytes=engine.fetched_bytes, load_seconds=engine.fetched_s),
    )
    return dataclasses.replace(
        _NO_FIGURES,
        running=engine.running,
        waiting=engine.waiting,
        prefill_tokens_per_s=1 / engine.spec.prompt_token_s,
        tiers=tiers,
    )


class Gateway:
    """Routes as `server.pool.engine_pool` does, with a policy in the router's place."""

    def __init__(self, heard: Sequence[Heard], clock: Clock, policy: Policy) -> None:
        self._policy = policy
        self._prefixes = PrefixTable()
        self._own: Counter[str] = Counter()
        costs = LoadCosts()
        self._numbers = {engine.name: number for number, engine in enumerate(heard)}
        self._engines = [
            PooledEngine(
                Member(name=client.name, address=""),
                cast(EngineClient, client),
                base_revision="",
                costs=costs,
                num_own=self._own.__getitem__,
                clock=lambda: clock.now_s,
            )
            for client in heard
        ]

    def look(self) -> None:
        """Take in the figures and residencies that have arrived."""
        for engine in self._engines:
            engine.look()

    def choose(
        self, key: str, adapter: AdapterRef | None, prompt_tokens: int, marks: Sequence[bytes]
    ) -> int:
        """Choose an engine, count the request there, and return the engine's number."""
        cached = self._prefixes.cached_tokens(marks)
        views = [
            engine.view(adapter, prompt_tokens - cached.get(engine.name, 0))
            for engine in self._engines
        ]
        name = self._policy.choose(key, views).name
        self._prefixes.note(name, marks)
        self._own[name] += 1
        number = self._numbers[name]
        if adapter:
            self._engines[number].expect(adapter)
        return number

    def note_end(self, number: int, seconds: float) -> None:
        """Note the end of a request, which took `seconds` at an engine."""
        engine = self._engines[number]
        engine.note_request(seconds)
        self._own[engine.name] -= 1


def marks_of(beginning: tuple[int | None, int], shared_tokens: int) -> list[bytes]:
    """Return marks as `server.pool.prefix_table.marks_of` does, of the shared tokens only: no other
    tokens are the same in two prompts.
    """
    return [f"{beginning}/{n}".encode() for n in range(shared_tokens // CHUNK_TOKENS)]
