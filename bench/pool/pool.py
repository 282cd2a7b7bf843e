"""A modelled pool from its first request to its last, under one policy; and the outcome."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.pool.clock import Clock
from bench.pool.engine import Engine, Job
from bench.pool.gateway import Gateway, Heard, figures_of, marks_of
from bench.pool.machine import Machine, MachineSpec
from bench.pool.policies import Policy
from bench.pool.steps import EngineSpec
from bench.pool.traffic import Adapter, Arrival
from engine.messages import Residency, Tier

_FIGURES_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Sizes and delays of a modelled pool.

    gateways: number of gateways; requests come to them in turn.   lag_s: delay of all messages
    from engines.   shared_tokens: length of the prefix that prompts share; at most the whole
    prompt.
    """

    engines: int = 10
    gateways: int = 1
    lag_s: float = 0.0
    shared_tokens: int = 0
    engine: EngineSpec = EngineSpec()
    machine: MachineSpec = MachineSpec()


@dataclass(slots=True)
class Outcome:
    """Figures since `from_s`. ttft_s: of requests that came since then, in the order of their first
    tokens.

    fetched, copied: bytes of each load from the store to a disk, and from a disk into an arena.
    replicas: number of arenas that hold each adapter at the last arrival.
    """

    from_s: float
    ttft_s: list[float] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)  # by engine
    output_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choose_s: list[float] = field(default_factory=list)
    replicas: Counter[int] = field(default_factory=Counter)


class Pool:
    """A modelled pool. `run` may be called once."""

    def __init__(
        self,
        spec: PoolSpec,
        adapters: Sequence[Adapter],
        make_policy: Callable[[int], Policy],
        from_s: float,
    ) -> None:
        self.spec = spec
        self.outcome = Outcome(from_s)
        self._clock = Clock()
        self._adapters = adapters
        num_machines = -(-spec.engines // spec.machine.engines)
        machines = [
            Machine(spec.machine, self._clock, self._counting(self.outcome.fetched))
            for _ in range(num_machines)
        ]
        self._engines = [
            Engine(
                spec.engine,
                self._clock,
                machines[number // spec.machine.engines],
                adapters,
                self._telling(number),
                self._counting(self.outcome.copied),
            )
            for number in range(spec.engines)
        ]
        self._heard = [Heard(engine, f"engine-{n + 1}") for n, engine in enumerate(self._engines)]
        self._gateways = [
            Gateway(self._heard, self._clock, make_policy(number))
            for number in range(spec.gateways)
        ]
        self.outcome.requests = [0] * spec.engines

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        for arrival in arrivals:
            self._clock.at(arrival.at_s, partial(self._arrive, arrival))
        last_s = arrivals[-1].at_s
        self._clock.at(self.outcome.from_s, self._begin)
        self._clock.at(last_s, self._end)
        for number in range(int(last_s / _FIGURES_EVERY_S)):
            self._clock.at(number * _FIGURES_EVERY_S, self._tell_figures)
        self._clock.run()
        return self.outcome

    def _arrive(self, arrival: Arrival) -> None:
        number, adapter = arrival.number, arrival.adapter
        gateway = self._gateways[number % len(self._gateways)]
        ref = None if adapter is None else self._adapters[adapter].ref
        key = str(number) if ref is None else ref.object_key
        beginning = (adapter, arrival.beginning)
        shared_tokens = min(self.spec.shared_tokens, arrival.prompt_tokens)
        marks = marks_of(beginning, shared_tokens)
        start_s = time.perf_counter()
        engine = gateway.choose(key, ref, arrival.prompt_tokens, marks)
        choose_s = time.perf_counter() - start_s
        if self._counts():
            self.outcome.choose_s.append(choose_s)
            self.outcome.requests[engine] += 1
            self.outcome.prompt_tokens += arrival.prompt_tokens
        job = Job(
            number,
            adapter,
            beginning,
            shared_tokens,
            arrival.prompt_tokens,
            arrival.output_tokens,
            on_first=lambda: self._note_first(arrival),
            on_end=lambda: gateway.note_end(engine, self._clock.now_s - arrival.at_s),
        )
        self._engines[engine].submit(job)

    def _note_first(self, arrival: Arrival) -> None:
        if arrival.at_s >= self.outcome.from_s:
            self.outcome.ttft_s.append(self._clock.now_s - arrival.at_s)

    def _tell_figures(self) -> None:
        figures = [figures_of(engine) for engine in self._engines]

        def arrive() -> None:
            for heard, stats in zip(self._heard, figures, strict=True):
                heard.stats = stats
            for gateway in self._gateways:
                gateway.look()

        self._later(arrive)

    def _telling(self, engine: int) -> Callable[[int, Tier], None]:
        def tell(adapter: int, tier: Tier) -> None:
            ref = self._adapters[adapter].ref
            moved = Residency(
                object_key=ref.object_key, digest=ref.digest, tier=tier, size_bytes=ref.size_bytes
            )
            residency = self._heard[engine].residency
            self._later(partial(residency.__setitem__, ref.object_key, moved))

        return tell

    def _later(self, event: Callable[[], None]) -> None:
        if self.spec.lag_s:
            self._clock.after(self.spec.lag_s, event)
        else:
            event()

    def _counting(self, sizes: list[int]) -> Callable[[int], None]:
        def count(size_bytes: int) -> None:
            if self._counts():
                sizes.append(size_bytes)

        return count

    def _counts(self) -> bool:
        return self._clock.now_s >= self.outcome.from_s

    def _begin(self) -> None:
        self._before = [(engine.output_tokens, engine.cached_tokens) for engine in self._engines]

    def _end(self) -> None:
        outcome = self.outcome
        outcome.output_tokens = [
            engine.output_tokens - output
            for engine, (output, _) in zip(self._engines, self._before, strict=True)
        ]
        outcome.cached_tokens = sum(
            engine.cached_tokens - cached
            for engine, (_, cached) in zip(self._engines, self._before, strict=True)
        )
        for engine in self._engines:
            outcome.replicas.update(engine.resident)
