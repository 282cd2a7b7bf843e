"""A runner that notes each batch and passes it on."""

from typing import Any

from engine.core import EngineCore
from engine.steps.batch import Batch
from engine.steps.runner import Runner


class StepLog:
    """Implements engine.core.Runner around a runner.

    last: the batch that was launched last.   steps: (tokens, rows that choose a token) of each.
    num_rows, num_adapters: sums of the batches' rows and distinct adapters.
    """

    def __init__(self, runner: Runner) -> None:
        self.last = Batch(0, ())
        self.steps: list[tuple[int, int]] = []
        self.num_rows = self.num_adapters = 0
        self._runner = runner

    @classmethod
    def of(cls, core: EngineCore) -> "StepLog":
        """Install a log in `core`, which records its steps from now on."""
        log = cls(core.runner)
        core.runner = log
        return log

    def launch(self, batch: Batch) -> None:
        self.last = batch
        self.steps.append((batch.num_tokens, sum(row.sampling is not None for row in batch.rows)))
        self.num_rows += len(batch.rows)
        self.num_adapters += len(batch.adapters)
        self._runner.launch(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
