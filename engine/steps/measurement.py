"""Measures how long steps take on this machine, when an engine starts."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from engine.steps.batch import Batch, ScheduledRow, Scoring
from engine.steps.curve import StepCurve
from engine.steps.runner import Runner

SIZES = (1, 8, 4, 16, 2, 32, 6, 12, 24, 48, 64)
"""Tokens of the measured steps; those that matter most come first, as time may run out."""
DEVICE_SIZES = (1, 8, 64, 256, 128, 16, 32, 96, 192, 4, 2, 24, 48)
"""The same on a GPU, which has arithmetic for more tokens in the time that it reads the weights."""
_MOST_S, _FAR_S = 2.0, 0.5
"""Time of the whole measurement, and the part of it that is kept for steps with many keys."""
_MOST_ROUNDS = 5
_ROW_TOKENS = 8
_FAR_KEYS = 1024
"""Place of the rows that tell what it costs to attend to one more key."""

_Rows = Sequence[ScheduledRow]

Run = Callable[[_Rows], float]
"""Runs a step of these rows, and returns the seconds that it took."""


def steps_of(runner: Runner) -> Run:
    """A function that has a runner compute a step."""

    def launch(rows: _Rows) -> None:
        runner.launch(Batch(0, tuple(rows)))

    def run(rows: _Rows) -> None:
        launch(rows)
        runner.collect()

    def run_among_others(rows: _Rows) -> float:
        """Seconds from the end of such a step to that of the next one, while the one after that is
        launched. The rows have drafts and score nothing, so the steps run as graphs.
        """
        rows = [row._replace(scoring=None, num_drafts=len(row.token_ids) - 1) for row in rows]
        launch(rows)
        launch(rows)
        runner.collect()
        begun_at = time.perf_counter()
        launch(rows)
        runner.collect()
        seconds = time.perf_counter() - begun_at
        runner.collect()
        return seconds

    return run_among_others if runner.lag else on_processor(run)


def on_processor(run: Callable[[_Rows], object]) -> Run:
    """A function that runs a step by `run`, which returns when the step has finished.

    It takes processor seconds: only their ratios count, and others may be busy as well.
    """

    def timed(rows: _Rows) -> float:
        begun_at = time.process_time()
        run(rows)
        return time.process_time() - begun_at

    return timed


def measure_steps(
    run: Run,
    block_size: int,
    num_slabs: int,
    most_tokens: int,
    max_model_len: int,
    sizes: Sequence[int] = SIZES,
) -> StepCurve:
    """Measure steps on slabs that nobody uses yet, for about two seconds at most.

    num_slabs: of the arena.   most_tokens: of a step.   max_model_len: of a row.   sizes: tokens of
    steps. Other work on the machine only ever makes a step slower: each counts by its fastest run,
    and none as slower than a larger one.
    """
    until = time.monotonic() + _MOST_S
    most = min(most_tokens, num_slabs * _ROW_TOKENS)
    sizes = [size for size in sizes if size <= most]
    near = _seconds_of(run, until - _FAR_S, {size: _rows(size, block_size) for size in sizes})
    points = [(size, min(near[t] for t in near if t >= size)) for size in sorted(near)]
    if len(points) == 1:
        points.append((points[0][0] + 1, points[0][1]))
    keys = min(_FAR_KEYS, max_model_len, (num_slabs - 1) * block_size)
    if _ROW_TOKENS not in near or keys < _ROW_TOKENS:
        return StepCurve(tuple(points))
    start = keys - _ROW_TOKENS
    behind = {count: [_row(start, count, 0, block_size)] for count in (1, _ROW_TOKENS)}
    far = _seconds_of(run, until, behind)
    extra_s = (far[_ROW_TOKENS] - far[1]) - (near[_ROW_TOKENS] - near[1])
    return StepCurve(tuple(points), max(0.0, extra_s / ((_ROW_TOKENS - 1) * keys)))


def _seconds_of(run: Run, until: float, steps: Mapping[int, _Rows]) -> dict[int, float]:
    """The fastest run of each step, or of the first two if time runs out.   until: monotonic."""
    fastest: dict[int, float] = {}
    run(steps[1])  # the first step makes buffers
    for size, rows in itertools.chain.from_iterable([steps.items()] * _MOST_ROUNDS):
        if len(fastest) >= 2 and time.monotonic() > until:
            break
        fastest[size] = min(run(rows), fastest.get(size, math.inf))
    return fastest


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
        num_output_tokens=1,  # so that the meter counts none of its tokens
        scoring=Scoring(0, (0,) * num_tokens, 0),
    )
