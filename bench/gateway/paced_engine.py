"""`python -m bench.gateway.paced_engine CONFIG.json`: the real engine, whose runner has no model.

A step gives every running request a letter. It begins PACED_STEP_S after the previous step began,
or as soon as it can if PACED_STEP_S is 0.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import engine.__main__ as engine_process
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.steps.batch import Batch, StepTokens
from engine.steps.meter import TokenMeter


class PacedRunner:
    """Implements engine.core.Runner for requests without grammars."""

    lag = 0

    def __init__(self, meter: TokenMeter) -> None:
        self._meter = meter
        self._step_s = float(os.environ.get("PACED_STEP_S", "0"))
        self._due = 0.0
        self._num_steps = 0

    def launch(self, batch: Batch) -> None:
        if self._step_s:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due, time.monotonic()) + self._step_s
        self._batch = batch

    def collect(self) -> StepTokens:
        self._num_steps += 1
        rows, letter = self._batch.rows, ord("a") + self._num_steps % 26
        tokens = [letter if row.sampling else None for row in rows]
        prompt = sum(len(row.token_ids) for row in rows if row.num_output_tokens == 0)
        self._meter.count(prompt, sum(token is not None for token in tokens))
        return StepTokens(tokens)


def _build(
    config: EngineConfig, engine_id: str, vocabulary: Sequence[bytes]
) -> tuple[EngineCore, EngineConfig]:
    core, config = build_core(config, engine_id, vocabulary)
    core.runner = PacedRunner(TokenMeter(Path(config.data_dir) / "meter"))
    return core, config


if __name__ == "__main__":
    engine_process.build_core = _build
    engine_process.main()
