"""Runners, which compute steps on a device."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.grammar.matcher import Mask
from engine.steps.batch import Batch, StepTokens
from engine.steps.meter import TokenMeter


class Runner(Protocol):
    """Runs steps on the device, in the order in which they are launched.

    lag: steps that may run while the next one is being scheduled; 0 if `launch` itself computes.
    meter: its count of what it computed.   copy_bytes_per_s: measured speed of copies between arena
    and swap space; 0 if there is no swap space.
    """

    lag: int
    meter: TokenMeter
    copy_bytes_per_s: float

    def launch(self, batch: Batch) -> None:
        """Begin a step. If it is constrained, its tokens are chosen by `choose`, else at once."""
        ...

    def choose(self, masks: Mapping[int, Sequence[Mask]]) -> None:
        """Choose the tokens of the newest step, which is constrained.

        masks: by row number, of the next token, then of those behind drafts. A constrained row
        without a mask chooses no token, and one with too few verifies fewer drafts.
        """
        ...

    def collect(self) -> StepTokens:
        """Wait until the oldest step has finished, and return its tokens."""
        ...
