"""The burst that our engine and its peers are measured with: one model, many adapters at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.checkpoint import Checkpoint, make_checkpoint
from bench.workload import BenchRequest, Lengths, Workload, make_requests

# The headline is 16, two requests an adapter; 32 leaves nothing to group, 0 is the base model.
NUM_ADAPTERS = (0, 1, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Burst:
    """All requests come at 0, the answers are greedy and end by their length alone.

    Nothing but the models asked for depends on how many adapters there are.
    """

    stack: str = "smollm2-135m"
    num_requests: int = 32
    prompt_tokens: Lengths = Lengths(64, 256)
    output_tokens: Lengths = Lengths(64, 64)

    def make_checkpoint(self, folder: Path) -> Checkpoint:
        """As many adapters as any variant asks for, of ranks 8 and 16 in turn."""
        return make_checkpoint(self.stack, folder, max(NUM_ADAPTERS))

    def requests(self, checkpoint: Checkpoint, num_adapters: int) -> list[BenchRequest]:
        """The first `num_adapters` adapters, in turn."""
        workload = Workload(
            base_model=checkpoint.base_model,
            models=tuple(checkpoint.adapters)[:num_adapters],
            popularity="distinct" if num_adapters else "none",
            rate=float("inf"),
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            vocab_size=checkpoint.vocab_size,
        )
        return make_requests(workload)

    def setup(self, num_adapters: int) -> dict[str, Any]:
        """The part of a row's `setup` that every system shares."""
        return {
            "model": self.stack,
            "adapters": num_adapters,
            "requests": self.num_requests,
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
        }
