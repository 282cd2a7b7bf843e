"""Host memory of packed adapters: slabs of one region, which is made once and only dealt out."""

from collections import deque

import numpy as np
import torch


class HostRegion:
    """memory: [slabs, slab_bytes] uint8.

    One thread takes. Any thread gives back, without a lock: what it gives waits in a deque until
    the next take.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._is_free = np.ones(len(memory), dtype=bool)
        self._given_back: deque[tuple[int, ...]] = deque()

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many slabs, or None if fewer are free.

        The smallest run of neighbours that holds them all is taken, or else the largest runs:
        neighbours are copied at once.
        """
        self._collect()
        runs = sorted(self._free_runs(), key=len)
        fitting = next((run for run in runs if len(run) >= count), None)
        slabs: list[int] = []
        for run in [fitting] if fitting else reversed(runs):
            slabs += run[: count - len(slabs)]
        if len(slabs) < count:
            return None
        self._is_free[slabs] = False
        return tuple(slabs)

    def give_back(self, slabs: tuple[int, ...]) -> None:
        """Nobody reads or writes these any more."""
        self._given_back.append(slabs)

    def _collect(self) -> None:
        while self._given_back:
            slabs = list(self._given_back.popleft())
            assert not self._is_free[slabs].any(), "given back twice"
            self._is_free[slabs] = True

    def _free_runs(self) -> list[range]:
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False)).tolist()
        return [range(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
