"""Time of a step without the model: scheduling, taking tokens in, the journal.

The engine is complete but for its runner, which has its tokens at once. The bound is Python.
"""

import time
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import percentiles_ms, ratio
from bench.session import Ask, Session
from engine.batch import Batch, StepTokens


class _NoModel:
    """An engine.core.Runner that chooses token 1 without a model."""

    lag = 0

    def launch(self, batch: Batch) -> None:
        self._tokens = StepTokens([1 if row.sampling else None for row in batch.rows])

    def collect(self) -> StepTokens:
        return self._tokens


@dataclass(frozen=True, kw_only=True)
class Overhead(Experiment):
    """The time of a step without the model.

    running: requests that decode.   waiting: requests queued behind them.   tenants: senders.
    """

    stack: str = "small-5m"
    running: tuple[int, ...] = (64, 256)
    waiting: int = 1000
    tenants: int = 20
    prompt_tokens: int = 300
    steps: int = 200
    arena_tokens: int = 196_608

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for running in self.running:
            alone, crowded = (self._step_ms(factory, running, n) for n in (0, self.waiting))
            result[f"running_{running}"] = {
                "step_ms": alone,
                "step_ms_with_waiting": crowded,
                "with_waiting_to_without": ratio(crowded["p50"], alone["p50"]),
            }
        return result

    def _step_ms(self, factory: EngineFactory, running: int, waiting: int) -> dict[str, Any]:
        """Time steps while `running` requests decode and no waiting request has a seat."""
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=1024,
            max_num_seqs=running,
            max_num_batched_tokens=512,
            max_waiting=running + waiting,
        )
        core.runner = _NoModel()
        session = Session(core)
        for i in range(running + waiting):
            prompt = tuple(2 + i % 7 + j % 90 for j in range(self.prompt_tokens))
            tenant_id = f"tenant-{i % self.tenants}"
            session.send(Ask(prompt_token_ids=prompt, max_tokens=600, tenant_id=tenant_id))
        while session.num_tokens(running - 1) < 1:
            session.step()
        seconds = []
        for _ in range(self.steps):
            start = time.perf_counter()
            session.step()
            seconds.append(time.perf_counter() - start)
        session.stop()
        return percentiles_ms(seconds)
