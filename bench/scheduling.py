"""`python -m bench.scheduling`: prefix cache, chunked prefill and fairness, each with and without.
Engines run in this process, on a random model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

from bench.in_process import EngineFactory, EngineMeasurement
from bench.measurement import Figures, main
from bench.outcome import Outcome, gaps_between
from bench.report import percentiles_ms, ratio
from bench.session import Ask, Session, run
from engine.config import SchedulingPolicy
from engine.scheduling.fairness import DECODE_COST, PREFILL_COST


@dataclass(frozen=True, kw_only=True)
class PrefixCache(EngineMeasurement):
    """The time to the first token after a shared system prompt; one request at a time.

    The bound is arithmetic: a miss computes the whole prompt, a hit the last shared block and its
    own tokens. requests_without: requests without the cache; a few, since all are misses.
    """

    stack: str = "smollm2-135m"
    shared_tokens: int = 1000
    own_tokens: int = 32
    output_tokens: int = 2
    requests: int = 50
    requests_without: int = 8
    max_model_len: int = 1280
    arena_tokens: int = 4096
    seed: int = 0

    def run(self, factory: EngineFactory) -> Figures:
        stream = random.Random(self.seed)
        shared = factory.random_tokens(stream, self.shared_tokens)
        asks = [
            Ask(shared + factory.random_tokens(stream, self.own_tokens), self.output_tokens)
            for _ in range(self.requests)
        ]
        miss_s, *hits_s = self._ttfts_s(factory, asks, prefix_caching=True)
        without_s = self._ttfts_s(factory, asks[: self.requests_without], prefix_caching=False)
        return {
            "miss_ttft_ms": percentiles_ms([miss_s])["p50"],
            "hit_ttft_ms": percentiles_ms(hits_s),
            "without_cache_ttft_ms": percentiles_ms(without_s),
            "hit_to_miss": ratio(median(hits_s), miss_s),
            "hit_to_without_cache": ratio(median(hits_s), median(without_s)),
        }

    def _ttfts_s(
        self, factory: EngineFactory, asks: Sequence[Ask], *, prefix_caching: bool
    ) -> list[float]:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            prefix_caching=prefix_caching,
        )
        return [outcome.ttft_s for ask in asks for outcome in run(core, [ask])]


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefill(EngineMeasurement):
    """The effect of a long prompt on running streams; a prompt takes the same time either way.

    lead_tokens, tail_tokens: tokens of each stream before and after the long prompt arrives.
    chunk_tokens: max_num_batched_tokens; None is the device's default.   whole_tokens: the same,
    large enough for the long prompt and the streams.
    """

    stack: str = "smollm2-135m"
    streams: int = 8
    stream_prompt_tokens: int = 64
    lead_tokens: int = 16
    tail_tokens: int = 64
    prompt_tokens: int = 3000
    chunk_tokens: int | None = None
    whole_tokens: int = 4096
    max_model_len: int = 4096
    arena_tokens: int = 8192
    seed: int = 0

    def run(self, factory: EngineFactory) -> Figures:
        chunked = self._run(factory, self.chunk_tokens)
        whole = self._run(factory, self.whole_tokens)
        p99s = [side["itl_during_prefill_ms"]["p99"] for side in (chunked, whole)]
        return {
            "chunked": chunked,
            "whole": whole,
            "chunked_to_whole": {
                "itl_p99_during_prefill": ratio(*p99s),
                "prompt_ttft": ratio(chunked["prompt_ttft_ms"], whole["prompt_ttft_ms"]),
            },
        }

    def _run(self, factory: EngineFactory, max_num_batched_tokens: int | None) -> Figures:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        stream, session = random.Random(self.seed), Session(core)
        for _ in range(self.streams):
            prompt = factory.random_tokens(stream, self.stream_prompt_tokens)
            session.send(Ask(prompt, self.lead_tokens + self.tail_tokens))
        while min(map(session.num_tokens, range(self.streams))) < self.lead_tokens:
            session.step()
        session.send(Ask(factory.random_tokens(stream, self.prompt_tokens), max_tokens=1))
        session.finish()
        *streams, long = session.outcomes()
        gaps_s = gaps_between(streams, long.sent_s, long.chunk_s[0])
        return {
            "max_num_batched_tokens": core.scheduler.config.max_num_batched_tokens,
            "itl_before_ms": percentiles_ms(gaps_between(streams, 0.0, long.sent_s)),
            "itl_during_prefill_ms": percentiles_ms(gaps_s),
            "prompt_ttft_ms": percentiles_ms([long.chunk_s[0] - long.sent_s])["p50"],
        }


@dataclass(frozen=True, kw_only=True)
class Fairness(EngineMeasurement):
    """The service of two tenants while both are backlogged, by policy.

    Service is counted from the answers, in the engine's unit: a prompt token is 1, a generated
    token 2. small_requests: requests of the small tenant, before each of which the large tenant
    sends `load_ratio`; all are sent at once. Lengths are uniform within their bounds.
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

    def run(self, factory: EngineFactory) -> Figures:
        stream = random.Random(self.seed)
        asks = [
            Ask(
                factory.random_tokens(stream, stream.randint(*self.prompt_tokens)),
                stream.randint(*self.output_tokens),
                tenant_id=tenant_id,
            )
            for _ in range(self.small_requests)
            for tenant_id in ["large"] * self.load_ratio + ["small"]
        ]
        return {policy: self._run(factory, asks, policy) for policy in get_args(SchedulingPolicy)}

    def _run(self, factory: EngineFactory, asks: Sequence[Ask], policy: str) -> Figures:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=policy,
        )
        tenants: dict[str, list[Outcome]] = {"large": [], "small": []}
        for ask, outcome in zip(asks, run(core, asks), strict=True):
            tenants[ask.tenant_id].append(outcome)
        large, small = tenants["large"], tenants["small"]
        # Until the last request of a tenant has its first token, one of the tenant's waits.
        end_s = min(max(o.chunk_s[0] for o in outcomes) for outcomes in (large, small))
        return {
            "both_backlogged_s": round(end_s, 3),
            "service_large_to_small": ratio(_service(large, end_s), _service(small, end_s)),
            "ttft_small_ms": percentiles_ms(o.ttft_s for o in small),
        }


def _service(outcomes: Sequence[Outcome], until_s: float) -> float:
    """Return the service by `until_s`: of tokens that had come, and of prompts whose first had."""
    return sum(
        PREFILL_COST * outcome.num_prompt_tokens * (outcome.chunk_s[0] <= until_s)
        + DECODE_COST * sum(at_s <= until_s for at_s in outcome.chunk_s)
        for outcome in outcomes
    )


MEASUREMENTS = {
    "scheduling.prefix": PrefixCache(),
    "scheduling.chunked": ChunkedPrefill(),
    "scheduling.fairness": Fairness(),
}

if __name__ == "__main__":
    main("bench.scheduling", MEASUREMENTS, __doc__)
