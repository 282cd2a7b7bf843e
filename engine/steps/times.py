"""How long a step may take, judged by the last steps of its size; and what steps took."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.steps.batch import Batch

MOST_S = 120.0
"""Longest time of any step, which the first steps of a size get: they may compile kernels."""
_NUM_FIRST = 2
"""First steps of a size. Only the time of the second tells anything about later ones."""
_FACTOR = 20.0
_DECAY = 0.9

StepSize = tuple[int, bool]
"""Bits of a step's number of tokens, and whether it applies adapters."""


def size_of(batch: Batch) -> StepSize:
    # Rows of the base model come first.
    return batch.num_tokens.bit_length(), bool(batch.rows and batch.rows[-1].adapter_key)


@dataclass(slots=True)
class _Seen:
    """Steps of one size so far. longest_s: a maximum that decays with every step."""

    num_steps: int = 0
    longest_s: float = 0.0

    @property
    def limit_s(self) -> float:
        return MOST_S if self.num_steps < _NUM_FIRST else min(MOST_S, _FACTOR * self.longest_s)

    def note(self, seconds: float) -> None:
        self.num_steps += 1
        if self.num_steps >= _NUM_FIRST:
            self.longest_s = max(seconds, _DECAY * self.longest_s)


class StepTimes:
    """Times of steps by size.

    A single maximum would not do: on a slow CPU a full step takes a hundred times as long as a
    decode, and would be forgotten during a minute of decodes.
    """

    def __init__(self) -> None:
        self._seen: dict[StepSize, _Seen] = {}

    def limit_s(self, sizes: Collection[StepSize]) -> float:
        """Longest time that work on steps of these sizes may take."""
        return max((self._seen.get(size, _Seen()).limit_s for size in sizes), default=0.0)

    def note(self, sizes: Collection[StepSize], seconds: float) -> None:
        """Note how long work on steps of these sizes took."""
        for size in sizes:
            self._seen.setdefault(size, _Seen()).note(seconds)


class PhaseSeconds:
    """Seconds that steps spent in each phase, added up. A step reads the clock seven times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = 0.0
        self._seconds: dict[str, float] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._at = self._clock()

    def end(self, phase: str) -> None:
        """End a phase of the step, which began where the one before it ended."""
        began_at, self._at = self._at, self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self._at - began_at

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(phase, seconds), in the order of a step."""
        return tuple(self._seconds.items())
