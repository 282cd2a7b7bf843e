"""Host memory of packed adapters: slabs of one region that is allocated once."""

from collections import deque

import numpy as np
import torch


class HostRegion:
    """Hands out slabs of `memory`, [slabs, slab_bytes] uint8.

    One thread takes slabs. Any thread may give slabs back, without a lock: they wait in a deque
    until the next take.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._is_free = np.ones(len(memory), dtype=bool)
        self._given_back: deque[tuple[int, ...]] = deque()

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take `count` slabs; returns None if fewer are free.

        The slabs come from the smallest contiguous free run that is long enough, or else from the
        largest runs, since a contiguous run is one copy.
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
        """Give back slabs that threads and copies no longer use."""
        self._given_back.append(slabs)

    def _collect(self) -> None:
        while self._given_back:
            slabs = list(self._given_back.popleft())
            assert not self._is_free[slabs].any(), "given back twice"
            self._is_free[slabs] = True

    def _free_runs(self) -> list[range]:
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False)).tolist()
        return [range(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
