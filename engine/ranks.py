"""The ranks that share one model: which part this one holds, and how their numbers come together.

An engine without others has None in its place, and pays nothing.
"""

from typing import Protocol

import torch

from lora.shard import Shard


class Ranks(Protocol):
    """As one of them sees all. Every rank makes the same calls in the same order.

    shard: the part of the model that this rank holds.
    """

    shard: Shard

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over all ranks, in place; the same bits on each."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first rank's, in place, on every rank."""
        ...

    def least(self, value: int) -> int:
        """The least of all ranks' values. For the start, not for steps: it waits on the host."""
        ...
