"""Memory that is taken for KV, and the part of it that holds KV, step by step."""

from typing import Any

from bench.report import ratio
from engine.core import EngineCore

_POINTS = 100


class KVUse:
    """Tokens of KV, summed over the requests that run, after every step.

    written: computed and kept.   paged: the blocks that hold them, as in our engine.
    to_own_length: one contiguous piece per request of its final length, which is not known ahead.
    to_max_model_len: one contiguous piece per request of the longest length allowed.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.samples: list[dict[str, int]] = []

    def sample(self, core: EngineCore) -> None:
        running = list(core.scheduler.queues.running)
        self.samples.append(
            {
                "written": sum(r.num_computed_tokens for r in running),
                "paged": sum(len(r.block_ids) for r in running) * core.scheduler.layout.block_size,
                "to_own_length": sum(r.num_prompt_tokens + r.max_tokens for r in running),
                "to_max_model_len": len(running) * self.max_model_len,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Return the waste over the whole run as a share of the memory taken, and a few samples."""
        totals = {name: sum(s[name] for s in self.samples) for name in self.samples[0]}
        written = totals.pop("written")
        step = max(len(self.samples) // _POINTS, 1)
        return {
            "waste": {name: ratio(total - written, total) for name, total in totals.items()},
            "steps": len(self.samples),
            "every": step,
            "tokens": {name: [s[name] for s in self.samples[::step]] for name in self.samples[0]},
        }
