"""Time to the first token of requests that share a system prompt.

The bound is arithmetic: a miss computes the whole prompt, a hit the last shared block and its own
tokens. Requests are sent one at a time, so that no request waits for another.
"""

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import percentiles_ms, ratio
from bench.session import Ask, run


@dataclass(frozen=True, kw_only=True)
class PrefixCache(Experiment):
    """The time to the first token with and without the prefix cache.

    requests_without: requests sent without the cache; a few are enough, since all are misses.
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

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        asks = self._asks(factory)
        miss_s, *hits_s = self._ttfts_s(factory, asks, prefix_caching=True)
        without_s = self._ttfts_s(factory, asks[: self.requests_without], prefix_caching=False)
        return {
            "miss_ttft_ms": percentiles_ms([miss_s])["p50"],
            "hit_ttft_ms": percentiles_ms(hits_s),
            "without_cache_ttft_ms": percentiles_ms(without_s),
            "hit_to_miss": ratio(median(hits_s), miss_s),
            "hit_to_without_cache": ratio(median(hits_s), median(without_s)),
        }

    def _asks(self, factory: EngineFactory) -> list[Ask]:
        stream = random.Random(self.seed)
        shared = factory.random_tokens(stream, self.shared_tokens)
        return [
            Ask(
                prompt_token_ids=shared + factory.random_tokens(stream, self.own_tokens),
                max_tokens=self.output_tokens,
            )
            for _ in range(self.requests)
        ]

    def _ttfts_s(
        self, factory: EngineFactory, asks: list[Ask], *, prefix_caching: bool
    ) -> list[float]:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            prefix_caching=prefix_caching,
        )
        # Times count from sending, not from when requests were due: one is sent after the other.
        return [o.chunk_s[0] - o.sent_s for o in run(core, asks, batch_size=1)]
