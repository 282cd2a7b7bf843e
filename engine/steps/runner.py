"""Runners, which compute steps on a device."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.grammar.matcher import Mask
from engine.steps.batch import Batch, StepTokens


class Runner(Protocol):
    """Runs steps on the device, in the order in which they are launched.

    lag: steps that may run while the next one is being scheduled; 0 if `launch` itself computes.
    """

    lag: int

    def launch(self, batch: Batch) -> None:
        """Begin a step. If it is constrained, its tokens are chosen by `choose`, else at once."""
        ...

    def choose(self, masks: Mapping[int, Sequence[Mask]]) -> None:
        """Choose the tokens of the newest step, which is constrained.

        masks: by row number, of the next token, then of those behind drafts. A constrained row
        without a mask chooses no token, and one with too few verifies fewer drafts.
        """
        ...

    def count_forced(self, num_tokens: int) -> None:
        """Count tokens that answers got without a choice, as the meter counts chosen ones."""
        ...

    def collect(self) -> StepTokens:
        """Wait until the oldest step has finished, and return its tokens."""
        ...
