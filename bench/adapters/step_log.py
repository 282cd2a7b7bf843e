"""A runner that counts the rows and adapters of each batch and passes the batch on."""

from collections.abc import Mapping

from engine.batch import Batch, StepTokens
from engine.core import EngineCore, Runner
from engine.grammar.matcher import Mask


class StepLog:
    """Implements engine.core.Runner around a runner. last: the batch that was launched last."""

    def __init__(self, runner: Runner) -> None:
        self.lag = runner.lag
        self.last = Batch(0, ())
        self._runner = runner
        self._num_steps = self._num_rows = self._num_adapters = 0

    @classmethod
    def of(cls, core: EngineCore) -> "StepLog":
        """Install a log in `core`, which records its steps from now on."""
        log = cls(core.runner)
        core.runner = log
        return log

    def totals(self) -> tuple[int, int, int]:
        """Return the number of steps, and the sums of their rows and of their distinct adapters."""
        return self._num_steps, self._num_rows, self._num_adapters

    def launch(self, batch: Batch) -> None:
        self.last = batch
        self._num_steps += 1
        self._num_rows += len(batch.rows)
        self._num_adapters += len(batch.adapters)
        self._runner.launch(batch)

    def choose(self, masks: Mapping[int, Mask]) -> None:
        self._runner.choose(masks)

    def count_forced(self, num_tokens: int) -> None:
        self._runner.count_forced(num_tokens)

    def collect(self) -> StepTokens:
        return self._runner.collect()
