"""Tokens per second with swapping and with recomputation, in an arena too small for its requests.

Swapping is bounded by memory bandwidth, recomputing by arithmetic. The engine measures both and
takes the cheaper one; the row has its two figures.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import ratio, rounded
from bench.session import Ask, run
from engine.messages import EngineStats


@dataclass(frozen=True, kw_only=True)
class Preemption(Experiment):
    """Tokens per second with swapping and with recomputation.

    repeats: runs of each of the two, alternately, each on a fresh engine; medians count.

    arena_tokens: a quarter of the tokens of all requests.   swap_tokens: host memory for KV.
    """

    stack: str = "small-5m"
    repeats: int = 5
    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 128
    max_model_len: int = 256
    arena_tokens: int = 2048
    swap_tokens: int = 8192
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        stream = random.Random(self.seed)
        asks = [
            Ask(
                prompt_token_ids=factory.random_tokens(stream, self.prompt_tokens),
                max_tokens=self.output_tokens,
            )
            for _ in range(self.requests)
        ]
        swap, recompute = [], []
        for _ in range(self.repeats):
            swap.append(self._run(factory, asks, self.swap_tokens))
            recompute.append(self._run(factory, asks, 0))
        speeds = [median(speed for speed, _ in runs) for runs in (swap, recompute)]
        return {
            "swap": _summary(swap),
            "recompute": _summary(recompute),
            "swap_to_recompute": ratio(*speeds),
            "kv_bytes_per_token": factory.layout.kv_bytes_per_token,
        }

    def _run(
        self, factory: EngineFactory, asks: list[Ask], swap_tokens: int
    ) -> tuple[float, EngineStats]:
        """Return the generated tokens per second, and the engine's figures at the end."""
        core = factory.make(
            arena_tokens=self.arena_tokens,
            swap_tokens=swap_tokens,
            max_model_len=self.max_model_len,
        )
        outcomes = run(core, asks)
        num_tokens = sum(len(o.token_ids) for o in outcomes)
        return num_tokens / max(o.end_s for o in outcomes), core.take_stats()


def _summary(runs: Sequence[tuple[float, EngineStats]]) -> dict[str, Any]:
    _, stats = runs[-1]
    return {
        "output_tokens_per_s": rounded(median(speed for speed, _ in runs)),
        "output_tokens_per_s_of_each": [rounded(speed) for speed, _ in runs],
        "preemptions": stats.preemptions,
        "swapped": stats.swapped,
        "prefill_tokens_per_s": rounded(stats.prefill_tokens_per_s),
        "copy_bytes_per_s": rounded(stats.copy_bytes_per_s),
    }
