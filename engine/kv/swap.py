"""KV of preempted requests in host memory, and whether keeping it there is worth it.

Copies are part of steps: a batch's transfers run in order, before its forward pass. So a slot or
slab that one transfer has read may be written by the next one, and no copy is waited for by itself.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.steps.batch import Transfer

_WINDOW_S = 60.0
_MAX_SAMPLES = 4096
_FIRST_GUESS_TOKENS_PER_S = 1000.0


class PreemptionCosts:
    """Estimates what it costs to get a preempted request back, from measurements on this machine.

    copy_bytes_per_s: between arena and swap space, measured when the runner starts; 0 if unknown.
    """

    def __init__(
        self, copy_bytes_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.copy_bytes_per_s = copy_bytes_per_s
        self._clock = clock
        self._samples: deque[tuple[float, int, float]] = deque()
        self._num_tokens, self._seconds = 0, 0.0

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note a step of mostly prefill: it computed `num_tokens` in `seconds`."""
        if len(self._samples) == _MAX_SAMPLES:
            self._forget_oldest()
        self._samples.append((self._clock(), num_tokens, seconds))
        self._num_tokens += num_tokens
        self._seconds += seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed of the last minute, or of the last prefill step before; 0 before any."""
        oldest = self._clock() - _WINDOW_S
        while len(self._samples) > 1 and self._samples[0][0] < oldest:
            self._forget_oldest()
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that computing `num_tokens` would take; a guess before the first measurement."""
        return num_tokens / (self.prefill_tokens_per_s or _FIRST_GUESS_TOKENS_PER_S)

    def _forget_oldest(self) -> None:
        _, num_tokens, seconds = self._samples.popleft()
        self._num_tokens -= num_tokens
        self._seconds -= seconds

    def is_swap_cheaper(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether copying there and back beats computing again; False until both are measured."""
        prefill, copy = self.prefill_tokens_per_s, self.copy_bytes_per_s
        if not prefill or not copy:
            return False
        return 2 * num_bytes / copy < num_tokens / prefill


class SwapSpace:
    """Places for KV blocks in host memory: `num_slots` of them, each of the size of a slab."""

    def __init__(self, num_slots: int, slab_bytes: int, costs: PreemptionCosts) -> None:
        self.num_slots = num_slots
        self.slab_bytes = slab_bytes
        self.costs = costs
        self._free = deque(range(num_slots))
        self._transfers: list[Transfer] = []

    def is_worth_it(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to keep blocks here: there is room, and computing them again takes longer."""
        if not 0 < num_blocks <= len(self._free):
            return False
        return self.costs.is_swap_cheaper(num_tokens, num_blocks * self.slab_bytes)

    def move_out(self, block_ids: Sequence[int]) -> list[int]:
        """Copy blocks to free slots with the next step; return the slots."""
        slots = [self._free.popleft() for _ in block_ids]
        pairs = zip(block_ids, slots, strict=True)
        self._transfers += [Transfer(b, s, is_out=True) for b, s in pairs]
        return slots

    def move_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to blocks with the next step, and free them."""
        pairs = zip(block_ids, slots, strict=True)
        self._transfers += [Transfer(b, s, is_out=False) for b, s in pairs]
        self.free(slots)

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Take the copies that the next step has to run first."""
        transfers, self._transfers = self._transfers, []
        return tuple(transfers)

    def check_integrity(self, used: Sequence[int]) -> None:
        assert sorted([*self._free, *used]) == list(range(self.num_slots))
