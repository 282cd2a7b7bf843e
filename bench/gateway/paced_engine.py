"""`python -m bench.gateway.paced_engine CONFIG.json`: the real engine process without a model.

The scheduler, journal and wire are the product's. A step gives every running request a letter. It
begins PACED_STEP_S after the previous step began, or as soon as it can if PACED_STEP_S is 0.
"""

import json
import os
import sys
import time
from pathlib import Path

from engine.batch import Batch, StepTokens
from engine.config import EngineConfig
from tests.engine.fake_engine import serve
from tests.engine.fakes import FakeRunner

_NUM_SLABS = 1 << 16
"""Slabs of 16 tokens each: room for 1000 streams of 1000 tokens."""


class PacedRunner(FakeRunner):
    """A runner that keeps no context, so that a long context costs as little as a short one."""

    def __init__(self, meter: object) -> None:
        super().__init__(meter)  # type: ignore[arg-type]
        self._step_s = float(os.environ.get("PACED_STEP_S", "0"))
        self._due = 0.0
        self._num_steps = 0

    def launch(self, batch: Batch) -> None:
        if self._step_s:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due, time.monotonic()) + self._step_s
        super().launch(batch)

    def collect(self) -> StepTokens:
        batch = self._launched.popleft()
        self._num_steps += 1
        letter = ord("a") + self._num_steps % 26
        tokens = [letter if row.sampling else None for row in batch.rows]
        assert self.meter
        prompt = sum(len(row.token_ids) for row in batch.rows if row.num_output_tokens == 0)
        self.meter.count(prompt, sum(token is not None for token in tokens))
        return StepTokens(tokens)


def main() -> None:
    config = EngineConfig(**json.loads(Path(sys.argv[1]).read_text()))
    serve(config, make_runner=PacedRunner, num_slabs=_NUM_SLABS)


if __name__ == "__main__":
    main()
