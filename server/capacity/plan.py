"""The plan: which engine, how many of them, how fast they are, what a million tokens costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.capacity.arena import Limits
from server.capacity.engine_plan import EnginePlan, Load, Objective
from server.capacity.hardware import Hardware
from server.capacity.replay import Replayed
from server.capacity.sizes import ModelSizes, Quantization
from server.capacity.steps import Speed
from server.capacity.traffic import Traffic
from server.capacity.verdict import Verdict, judge

_COSTED: tuple[Quantization, ...] = ("float", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Wish:
    """A question: the model, the hardware, the traffic and the objective.

    loads: of all engines together, all of one kind; the last one is planned for.
    tensor_parallel_size: None for the smallest that keeps the objective.   max_devices: of one
    engine.   speed: rates by quantization.
    """

    sizes: ModelSizes
    hardware: Hardware
    quantization: Quantization
    limits: Limits
    traffic: Traffic
    loads: Sequence[Load]
    objective: Objective
    utilization: float
    max_devices: int
    tensor_parallel_size: int | None
    speed: Callable[[Quantization], Speed]

    def engine(self, quantization: Quantization, num_shards: int) -> EnginePlan:
        return EnginePlan(
            self.sizes, self.hardware, quantization, num_shards, self.limits, self.traffic,
            self.speed,
        )  # fmt: skip

    def shards(self) -> list[int]:
        """Numbers of ranks to try, the smallest first."""
        if self.tensor_parallel_size is not None:
            return [self.tensor_parallel_size]
        if self.hardware.kind == "cpu":
            return [1]  # ranks share one machine's memory and bandwidth
        return [n for n in self.sizes.shards() if n <= self.max_devices]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one kind.   capacity: the largest load of one; None if none keeps the objective.
    num_engines: for the load that is planned for; None where no number is enough.
    usd_per_million: of output tokens, at the wished utilisation of the capacity.
    """

    engine: EnginePlan
    capacity: Load | None
    at_capacity: Replayed | None
    num_engines: int | None
    usd_per_million: float | None

    @property
    def usd_per_hour(self) -> float:
        """Price of one engine."""
        return self.engine.num_shards * self.engine.hardware.usd_per_hour


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a wish.   tried: fleets by number of ranks.

    costs: a fleet of each quantization, on as few devices as keep the objective.   replayed: one
    engine of the chosen fleet under each load, or none if it does not fit.
    """

    wish: Wish
    fleet: Fleet
    tried: Sequence[Fleet]
    costs: Sequence[Fleet]
    replayed: Sequence[Replayed]
    verdict: Verdict


def make_plan(wish: Wish) -> Plan:
    """Plan for a wish."""
    tried = [_fleet(wish, wish.engine(wish.quantization, n)) for n in wish.shards()]
    fleet = _best(tried)
    costs = [
        fleet if name == wish.quantization else _first_able(wish, name)
        for name in dict.fromkeys((wish.quantization, *_COSTED))
    ]
    replayed = [fleet.engine.replay(load) for load in wish.loads if fleet.engine.fits]
    verdict = judge(fleet.engine, wish.objective, fleet.capacity, wish.loads[-1])
    return Plan(wish, fleet, tried, costs, replayed, verdict)


def _fleet(wish: Wish, engine: EnginePlan) -> Fleet:
    load = wish.loads[-1]
    capacity = engine.capacity(load, wish.objective) if engine.fits else None
    if capacity is None:
        return Fleet(engine, None, None, None, None)
    at_capacity = engine.replay(capacity)
    per_hour = 3600 * at_capacity.output_tokens_per_s * wish.utilization
    cost = 1e6 * engine.num_shards * wish.hardware.usd_per_hour / per_hour
    return Fleet(engine, capacity, at_capacity, engines_for(load, capacity), cost)


def engines_for(load: Load, capacity: Load) -> int:
    """How many engines a load needs."""
    return max(1, math.ceil(load.size / capacity.size - 1e-9))


def _first_able(wish: Wish, quantization: Quantization) -> Fleet:
    """The fleet on as few devices as keep the objective, or else the first that fits."""
    fleets = []
    for num_shards in wish.shards():
        fleets.append(_fleet(wish, wish.engine(quantization, num_shards)))
        if fleets[-1].capacity is not None:
            break
    return _best(fleets)


def _best(fleets: Sequence[Fleet]) -> Fleet:
    """The cheapest fleet that keeps the objective, else the first that fits, else the last."""
    able = [fleet for fleet in fleets if fleet.num_engines is not None]
    if able:
        return min(able, key=lambda f: ((f.num_engines or 1) * f.usd_per_hour, f.engine.num_shards))
    return next((fleet for fleet in fleets if fleet.engine.fits), fleets[-1])
