"""An arena that cannot hold all that runs: tokens/s with swapping, with recomputation, with room.

What bounds swapping is memory bandwidth, what bounds recomputing is arithmetic; the engine measures
both and takes the cheaper one, so its two figures are in the row.
"""

import random
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.in_process import Ask, EngineFactory, run
from bench.report import rate, ratio


@dataclass(frozen=True, kw_only=True)
class Preemption(Experiment):
    """arena_tokens: when the arena is too small.   swap_tokens: host memory for KV, when there is
    some.
    """

    stack: str = "smollm2-135m"
    requests: int = 12
    prompt_tokens: int = 64
    output_tokens: int = 128
    max_model_len: int = 256
    arena_tokens: int = 1024
    swap_tokens: int = 4096
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
        room = self.requests * self.max_model_len
        results = {
            "swap": self._run(factory, asks, self.arena_tokens, self.swap_tokens),
            "recompute": self._run(factory, asks, self.arena_tokens, 0),
            "room_for_all": self._run(factory, asks, room, 0),
        }
        speeds = {name: result["output_tokens_per_s"] for name, result in results.items()}
        return results | {
            "swap_to_recompute": ratio(speeds["swap"], speeds["recompute"]),
            "swap_to_room_for_all": ratio(speeds["swap"], speeds["room_for_all"]),
        }

    def _run(
        self, factory: EngineFactory, asks: list[Ask], arena_tokens: int, swap_tokens: int
    ) -> dict[str, Any]:
        core = factory.make(
            arena_tokens=arena_tokens, swap_tokens=swap_tokens, max_model_len=self.max_model_len
        )
        outcomes = run(core, asks)
        stats = core.take_stats()
        return {
            "output_tokens_per_s": rate(
                sum(len(o.token_ids) for o in outcomes), max(o.end_s for o in outcomes)
            ),
            "preemptions": stats.preemptions,
            "swapped": stats.swapped,
            "prefill_tokens_per_s": rate(round(stats.prefill_tokens_per_s), 1.0),
            "copy_bytes_per_s": rate(round(stats.copy_bytes_per_s), 1.0),
            "kv_bytes_per_token": factory.layout.kv_bytes_per_token,
        }
