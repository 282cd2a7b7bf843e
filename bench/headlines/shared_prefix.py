"""Requests that share most of their prompt, all at once, with and without the prefix cache.

The gain is bounded by the tokens left to compute; the row has the computed prompt tokens of both
sides.
"""

import random
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import rate, ratio
from bench.session import Ask, run


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Experiment):
    """The gain of the prefix cache for prompts that share a prefix.

    prompt_tokens: length of each prompt; the first `shared_tokens` are the same in all.
    """

    stack: str = "smollm2-135m"
    requests: int = 20
    prompt_tokens: int = 640
    shared_tokens: int = 512
    output_tokens: int = 8
    max_model_len: int = 1024
    arena_tokens: int = 24576
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        stream = random.Random(self.seed)
        shared = factory.random_tokens(stream, self.shared_tokens)
        own_tokens = self.prompt_tokens - self.shared_tokens
        asks = [
            Ask(
                prompt_token_ids=shared + factory.random_tokens(stream, own_tokens),
                max_tokens=self.output_tokens,
            )
            for _ in range(self.requests)
        ]
        cached = self._run(factory, asks, prefix_caching=True)
        without = self._run(factory, asks, prefix_caching=False)
        return {
            "cached": cached,
            "without_cache": without,
            "gain": ratio(cached["requests_per_s"], without["requests_per_s"]),
            "computed_prompt_tokens_less": ratio(
                without["computed_prompt_tokens"], cached["computed_prompt_tokens"]
            ),
        }

    def _run(
        self, factory: EngineFactory, asks: list[Ask], *, prefix_caching: bool
    ) -> dict[str, Any]:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            prefix_caching=prefix_caching,
        )
        found_before = core.take_stats().cached_tokens
        outcomes = run(core, asks)
        found = core.take_stats().cached_tokens - found_before
        return {
            "requests_per_s": rate(len(outcomes), max(o.end_s for o in outcomes)),
            "computed_prompt_tokens": sum(o.num_prompt_tokens for o in outcomes) - found,
        }
