"""Service of two tenants while both have a backlog; one has many times the other's load.

Service is counted from the answers, in the engine's unit: a prompt token is 1, a generated token 2.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.outcome import Outcome
from bench.report import percentiles_ms, ratio
from bench.session import Ask, run
from engine.fairness import DECODE_COST, PREFILL_COST, SchedulingPolicy


@dataclass(frozen=True, kw_only=True)
class Fairness(Experiment):
    """The service of two tenants with unequal loads.

    small_requests: requests of the small tenant. Before each the large tenant sends `load_ratio`
    requests. All are sent at once; lengths of prompts and answers are uniform within their bounds.
    """

    stack: str = "small-5m"
    small_requests: int = 30
    load_ratio: int = 10
    prompt_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (16, 48)
    max_num_seqs: int = 8
    max_model_len: int = 256
    arena_tokens: int = 4096
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        asks = self._asks(factory)
        return {policy: self._run(factory, asks, policy) for policy in get_args(SchedulingPolicy)}

    def _asks(self, factory: EngineFactory) -> list[Ask]:
        stream = random.Random(self.seed)
        round_of_tenants = ["large"] * self.load_ratio + ["small"]
        return [
            Ask(
                prompt_token_ids=factory.random_tokens(stream, stream.randint(*self.prompt_tokens)),
                max_tokens=stream.randint(*self.output_tokens),
                tenant_id=tenant_id,
            )
            for _ in range(self.small_requests)
            for tenant_id in round_of_tenants
        ]

    def _run(
        self, factory: EngineFactory, asks: Sequence[Ask], policy: SchedulingPolicy
    ) -> dict[str, Any]:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=policy,
        )
        outcomes = run(core, asks)
        tenants: dict[str, list[Outcome]] = {"large": [], "small": []}
        for ask, outcome in zip(asks, outcomes, strict=True):
            tenants[ask.tenant_id].append(outcome)
        large, small = tenants["large"], tenants["small"]
        end_s = min(backlogged_until_s(large), backlogged_until_s(small))
        return {
            "both_backlogged_s": round(end_s, 3),
            "service_large_to_small": ratio(service(large, end_s), service(small, end_s)),
            "ttft_small_ms": percentiles_ms(o.ttft_s for o in small),
            "ttft_large_ms": percentiles_ms(o.ttft_s for o in large),
        }


def backlogged_until_s(outcomes: Sequence[Outcome]) -> float:
    """Return when the last request of a tenant had its first token: until then a request waited."""
    return max(outcome.chunk_s[0] for outcome in outcomes)


def service(outcomes: Sequence[Outcome], until_s: float) -> float:
    """Return the service by `until_s`: of tokens that had come, and of prompts whose first had."""
    return sum(
        PREFILL_COST * outcome.num_prompt_tokens * (outcome.chunk_s[0] <= until_s)
        + DECODE_COST * sum(at_s <= until_s for at_s in outcome.chunk_s)
        for outcome in outcomes
    )
