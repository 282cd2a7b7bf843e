"""The same requests one at a time, in static batches, and batched continuously; and their KV.

Requests one at a time are bounded by reading every weight for every token; a batch shares these
reads until arithmetic bounds it. A static batch gets emptier until its longest answer has ended.
"""

import random
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.headlines.kv_use import KVUse
from bench.in_process import EngineFactory
from bench.report import rate, ratio
from bench.session import Ask, run
from engine.core import EngineCore


@dataclass(frozen=True, kw_only=True)
class Batching(Experiment):
    """The gain of continuous batching over static batches and single requests.

    output_tokens: bounds of the uniform lengths of answers.   max_model_len: tokens that a
    contiguous cache would reserve for every running request.
    """

    stack: str = "small-5m"
    requests: int = 100
    prompt_tokens: int = 32
    output_tokens: tuple[int, int] = (10, 500)
    static_batch: int = 8
    max_num_seqs: int = 64
    max_model_len: int = 2048
    arena_tokens: int = 32768
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        stream = random.Random(self.seed)
        asks = [
            Ask(
                prompt_token_ids=factory.random_tokens(stream, self.prompt_tokens),
                max_tokens=stream.randint(*self.output_tokens),
            )
            for _ in range(self.requests)
        ]
        use = KVUse(self.max_model_len)
        speeds = {
            "one_at_a_time": self._run(self._core(factory, 1), asks, batch_size=1),
            "static": self._run(
                self._core(factory, self.static_batch), asks, batch_size=self.static_batch
            ),
            "continuous_same_size": self._run(self._core(factory, self.static_batch), asks),
            "continuous": self._run(
                self._core(factory, self.max_num_seqs), asks, after_step=use.sample
            ),
        }
        continuous = speeds["continuous"]
        return {
            "output_tokens": sum(ask.max_tokens for ask in asks),
            "output_tokens_per_s": speeds,
            "continuous_to": {
                name: ratio(continuous, speed)
                for name, speed in speeds.items()
                if name != "continuous"
            },
            "kv": use.summary(),
        }

    def _core(self, factory: EngineFactory, max_num_seqs: int) -> EngineCore:
        return factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
        )

    @staticmethod
    def _run(core: EngineCore, asks: list[Ask], **options: Any) -> float:
        """Return the generated tokens per second; the time includes the prompts."""
        outcomes = run(core, asks, **options)
        speed = rate(sum(len(o.token_ids) for o in outcomes), max(o.end_s for o in outcomes))
        assert speed
        return speed
