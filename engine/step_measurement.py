"""Measures how long steps take on this machine, when an engine starts."""

import time
from collections.abc import Sequence
from itertools import pairwise

from engine.batch import Batch, ScheduledRow, Scoring
from engine.core import Runner
from engine.step_curve import StepCurve

_SIZES = (1, 8, 4, 16, 2, 32, 6, 12, 24, 48, 64)
"""Tokens of the measured steps; those that matter most come first, as time may run out."""
_MOST_S = 2.0
_REPEATS = 3
_ROW_TOKENS = 8
_FAR_KEYS = 1024
"""Keys of the step that tells what it costs to attend to one more key."""


def measure_steps(runner: Runner, block_size: int, num_slabs: int, most_tokens: int) -> StepCurve:
    """Measure steps on slabs that nobody uses yet, for two seconds at most, or a step of each kind.

    most_tokens: of a step.   num_slabs: of the arena.
    """
    until = time.monotonic() + _MOST_S
    _seconds(runner, [_row(0, 1, 0, block_size)])  # the first step makes buffers, or compiles
    seconds: dict[int, float] = {}
    for num_tokens in _SIZES:
        if len(seconds) >= 2 and time.monotonic() > until:
            break
        if num_tokens <= most_tokens and num_tokens <= num_slabs * _ROW_TOKENS:
            rows = _rows(num_tokens, block_size)
            seconds[num_tokens] = min(_seconds(runner, rows) for _ in range(_repeats(until)))
    if len(seconds) == 1:
        seconds[2] = seconds[1]
    points = sorted(seconds.items())
    rising = [(tokens, max(s for t, s in points if t <= tokens)) for tokens, s in points]
    return StepCurve(tuple(rising), _key_s(runner, block_size, num_slabs, most_tokens, until))


def _key_s(
    runner: Runner, block_size: int, num_slabs: int, most_tokens: int, until: float
) -> float:
    """Seconds that a token costs for each key, from two rows far behind a sequence's start."""
    keys = min(_FAR_KEYS, (num_slabs - 1) * block_size)
    if most_tokens < _ROW_TOKENS or keys < block_size or time.monotonic() > until:
        return 0.0
    few, many = (
        [min(_seconds(runner, [_row(start, n, 0, block_size)]) for _ in range(_REPEATS))
         for start in (0, keys - _ROW_TOKENS)]
        for n in (1, _ROW_TOKENS)
    )  # fmt: skip
    extra_s = (many[1] - many[0]) - (few[1] - few[0])
    return max(0.0, extra_s / ((_ROW_TOKENS - 1) * keys))


def _repeats(until: float) -> int:
    return _REPEATS if time.monotonic() < until else 1


def _rows(num_tokens: int, block_size: int) -> list[ScheduledRow]:
    """Rows of up to eight tokens at the starts of their sequences."""
    starts = [*range(0, num_tokens, _ROW_TOKENS), num_tokens]
    return [_row(0, end - start, i, block_size) for i, (start, end) in enumerate(pairwise(starts))]


def _row(start: int, num_tokens: int, first_slab: int, block_size: int) -> ScheduledRow:
    """A row whose tokens are scored, which takes a step as long as to choose tokens after them."""
    num_blocks = -(-(start + num_tokens) // block_size)
    return ScheduledRow(
        request_id=f"measured-{first_slab}",
        token_ids=(0,) * num_tokens,
        start=start,
        block_ids=tuple(range(first_slab, first_slab + num_blocks)),
        adapter_key=None,
        adapter_digest=None,
        adapter_generation=0,
        sampling=None,
        seed=0,
        num_output_tokens=1,  # so that the meter counts none of its tokens
        scoring=Scoring(0, (0,) * num_tokens, 0),
    )


def _seconds(runner: Runner, rows: Sequence[ScheduledRow]) -> float:
    begun_at = time.perf_counter()
    runner.launch(Batch(0, tuple(rows)))
    runner.collect()
    return time.perf_counter() - begun_at
