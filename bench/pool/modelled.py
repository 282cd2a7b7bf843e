"""Modelled pools under every policy: the same arrivals at the same times, adapters and machines.

The lower bound on cold loads is a fixed home for every adapter, however busy: the policy
`consistent_hash`. The lower bound on waiting is `least_loaded`, or `random` where engines report
late.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.billing.measurement import Measurement
from bench.pool.machine import MachineSpec
from bench.pool.policies import POLICIES
from bench.pool.pool import Outcome, Pool, PoolSpec
from bench.pool.steps import EngineSpec
from bench.pool.traffic import Adapter, Arrival, Traffic, make_adapters
from bench.report import percentiles_ms, ratio, rounded

_HOTTEST = 10
_COLD_FROM = 0.1
"""Share of the adapters, by popularity, that are not cold; all adapters after them are."""
_PREFIX_TOKENS = 100_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load on modelled pools.

    load: share of the rate that engines reach with all adapters resident and nothing cached.

    lag_s: delay of all messages from engines.   shared_tokens: tokens that a prompt shares with
    other prompts of its adapter.
    """

    engines: int
    adapters: int
    load: float
    gateways: int
    lag_s: float
    shared_tokens: int


@dataclass(frozen=True, kw_only=True)
class Modelled(Measurement):
    """A case for every combination; figures are medians over `seeds`, ratios are taken per seed.

    sizes: (engines, adapters).   engine, machine: their models.
    """

    sizes: tuple[tuple[int, int], ...] = ((10, 1000),)
    loads: tuple[float, ...] = (0.8,)
    gateways: tuple[int, ...] = (4,)
    lags_s: tuple[float, ...] = (0.25,)
    shared_tokens: tuple[int, ...] = (0,)
    exponent: float = 1.0
    burst_share: float = 0.1
    engine: EngineSpec = EngineSpec(prefix_tokens=_PREFIX_TOKENS)
    machine: MachineSpec = MachineSpec()
    warm_up_s: float = 30.0
    measured_s: float = 60.0
    seeds: tuple[int, ...] = (0, 1, 2)

    def measure(self, folder: Path) -> dict[str, Any]:
        return {"cases": [self._figures(case) for case in self.cases()]}

    def cases(self) -> list[Case]:
        return [
            Case(
                engines=engines,
                adapters=adapters,
                load=load,
                gateways=gateways,
                lag_s=lag_s,
                shared_tokens=shared_tokens,
            )
            for (engines, adapters), load, gateways, lag_s, shared_tokens in itertools.product(
                self.sizes, self.loads, self.gateways, self.lags_s, self.shared_tokens
            )
        ]

    def outcomes(self, case: Case, seed: int) -> dict[str, Outcome]:
        """Return the outcome of each policy."""
        traffic = Traffic(
            adapters=case.adapters, exponent=self.exponent, burst_share=self.burst_share
        )
        rate = case.load * case.engines * self.engine.requests_per_s(traffic)
        arrivals = traffic.arrivals(rate, self.warm_up_s + self.measured_s, seed)
        adapters = make_adapters(case.adapters, seed)
        return {name: self.outcome(case, name, adapters, arrivals) for name in POLICIES}

    def outcome(
        self, case: Case, policy: str, adapters: Sequence[Adapter], arrivals: Sequence[Arrival]
    ) -> Outcome:
        spec = PoolSpec(
            engines=case.engines,
            gateways=case.gateways,
            lag_s=case.lag_s,
            shared_tokens=case.shared_tokens,
            engine=self.engine,
            machine=self.machine,
        )
        return Pool(spec, adapters, POLICIES[policy], self.warm_up_s).run(arrivals)

    def _figures(self, case: Case) -> dict[str, Any]:
        runs = [self.outcomes(case, seed) for seed in self.seeds]
        by_policy = {
            name: _medians([figures(run[name], case.adapters) for run in runs]) for name in POLICIES
        }
        return {
            "engines": case.engines,
            "adapters": case.adapters,
            "load": case.load,
            "gateways": case.gateways,
            "lag_s": case.lag_s,
            "shared_tokens": case.shared_tokens,
            "policies": by_policy,
            "product_to": _medians([ratios(run) for run in runs]),
        }


def figures(outcome: Outcome, num_adapters: int) -> dict[str, float]:
    """Return loads and bytes per request, TTFT, and how adapters and requests are spread.

    fetched: loads from the store to a disk.   copied: loads from a disk into an arena.
    replicas: mean number of arenas that hold an adapter, for the hottest adapters, and for cold
    adapters that are in any arena.   choose_us: time a gateway takes to view all engines and choose
    one.
    """
    num_requests = sum(outcome.requests)
    ttft_ms = percentiles_ms(outcome.ttft_s)
    cold = [outcome.replicas[n] for n in range(int(num_adapters * _COLD_FROM), num_adapters)]
    return {
        "requests": num_requests,
        "fetched_per_request": rounded(len(outcome.fetched) / num_requests),
        "copied_per_request": rounded(len(outcome.copied) / num_requests),
        "copied_mb_per_request": rounded(sum(outcome.copied) / num_requests / 1e6),
        "ttft_ms_p50": ttft_ms["p50"] or 0.0,
        "ttft_ms_p99": ttft_ms["p99"] or 0.0,
        "max_to_mean_requests": _max_to_mean(outcome.requests),
        "max_to_mean_tokens": _max_to_mean(outcome.output_tokens),
        "replicas_hottest": mean(outcome.replicas[n] for n in range(_HOTTEST)),
        "replicas_cold": rounded(mean([n for n in cold if n] or [0])),
        "cached_share": rounded(outcome.cached_tokens / outcome.prompt_tokens),
        "choose_us": rounded(median(outcome.choose_s) * 1e6),
    }


def ratios(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Return the ratios of the product's figures to another policy's, in one run."""
    ours, chance = outcomes["product"], outcomes["random"]
    least_loaded = outcomes["least_loaded"]
    return {
        "random_fetched": _ratio(len(ours.fetched), len(chance.fetched)),
        "random_copied": _ratio(len(ours.copied), len(chance.copied)),
        "random_copied_bytes": _ratio(sum(ours.copied), sum(chance.copied)),
        "least_loaded_ttft_p99": ratio(_p99(ours), _p99(least_loaded)),
        "random_ttft_p99": ratio(_p99(ours), _p99(chance)),
    }


def _ratio(ours: float, theirs: float) -> float:
    """Return ours / theirs, and 1 if the other policy had no loads at all."""
    return ratio(ours, theirs) if theirs else 1.0


def _p99(outcome: Outcome) -> float:
    return percentiles_ms(outcome.ttft_s)["p99"] or 0.0


def _max_to_mean(values: Sequence[int]) -> float:
    return rounded(max(values) * len(values) / sum(values))


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: rounded(median(one[name] for one in samples)) for name in samples[0]}
