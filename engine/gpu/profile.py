"""Measures how much of a device's memory the largest steps leave for the arena.

Running them also compiles every kernel that a step outside of the graphs may need.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gpu.decoder import GpuDecoder
from engine.gpu.inputs import StepLimits
from engine.gpu.runner import GpuRunner
from engine.gpu.sampler import MOST_TOP_LOGPROBS
from engine.steps.batch import Batch, ScheduledRow, Scoring
from engine.steps.meter import TokenMeter
from engine.wire.messages import SamplingParams
from kernels.tiles import MAX_RANK, RANK_ROWS
from lora.batch import DeviceTables
from lora.device import Memory
from lora.layout import PROJECTIONS
from lora.packed import PackedForm

_KEY = "the largest adapter"
_KINDS_OF_GRAPHS = 3  # see StepGraphs
_MEASURED_GRAPHS = 8
"""Graphs whose memory is measured: several sizes, as the driver takes pieces of some MiB."""


def fit_slabs(memory: Memory, config: EngineConfig, slab_bytes: int) -> int:
    """Number of the arena's slabs: as many as requested, or as fit a share of the device's memory.

    memory: as it is while the largest steps run. Raises UnsupportedModel if there is no room.
    """
    room = memory.free_bytes - (1 - config.memory_utilization) * memory.total_bytes
    if config.arena_bytes is not None:
        room = min(config.arena_bytes, memory.free_bytes)
    num_slabs = int(room) // slab_bytes
    wanted = max(1, (config.arena_bytes or 0) // slab_bytes)
    if num_slabs < wanted:
        raise UnsupportedModel(
            f"weights and steps leave {memory.free_bytes >> 20} of the device's "
            f"{memory.total_bytes >> 20} MiB, which is too little for the arena: take quantization "
            "fp8, a smaller max_num_batched_tokens or arena_bytes, or a larger memory_utilization"
        )
    return num_slabs


def run_largest_steps(
    model: GpuDecoder,
    form: PackedForm,
    kv_dtype: torch.dtype,
    limits: StepLimits,
    is_eager: bool = False,
) -> Memory:
    """Measure the memory that is left beside a step of the most tokens, one of the most rows with
    the most drafts, and all graphs.

    All rows have an adapter of the highest rank, penalties, truncation and logprobs, and all of a
    prompt is scored. The arena has one slab, since nobody uses the results. The largest graphs stay
    captured meanwhile; the others fit into their tensors' memory.   is_eager: there are no graphs.
    """
    driver_bytes = 0
    layout, there = form.layout, model.device.torch_device

    def run() -> None:
        nonlocal driver_bytes
        slabs = torch.zeros(1, layout.slab_bytes, dtype=torch.uint8, device=there)
        places = layout.shape.num_layers, len(PROJECTIONS)
        table = torch.zeros(*places, MAX_RANK // RANK_ROWS, dtype=torch.int32, device=there)
        tables = DeviceTables(_KEY, form.base_revision, table, torch.zeros(*places, device=there))
        with tempfile.TemporaryDirectory() as folder:
            meter = TokenMeter(Path(folder) / "meter")
            runner = GpuRunner(model, slabs, form, kv_dtype, lambda _: (0, tables), meter, limits)
            driver_bytes = 0 if is_eager else _capture_largest(runner)
            lengths = _prefill_lengths(limits)
            prefills = [_row(i, length, layout.num_blocks) for i, length in enumerate(lengths)]
            for rows in (prefills, _decodes(limits, layout.num_blocks)):
                runner.launch(Batch(1, tuple(rows)))
                runner.collect()

    memory = model.device.measure(run)
    return replace(memory, free_bytes=memory.free_bytes - driver_bytes)


def _capture_largest(runner: GpuRunner) -> int:
    """Capture the largest graphs; return the bytes that the driver will keep for all graphs."""
    shapes, device = list(runner.graphs.shapes()), runner.device
    # Memory that is loaded and set up with the first graph of each kind belongs to no graph.
    runner.capture_graphs(shapes[:_KINDS_OF_GRAPHS])
    before = device.driver_bytes()
    measured = shapes[_KINDS_OF_GRAPHS : _KINDS_OF_GRAPHS + _MEASURED_GRAPHS]
    runner.capture_graphs(measured)
    return bytes_of_all(device.driver_bytes() - before, len(measured), len(shapes))


def bytes_of_all(grown_bytes: int, num_measured: int, num_graphs: int) -> int:
    """Bytes that all graphs take, if the measured ones took `grown_bytes` together."""
    return -(-max(grown_bytes, 0) * num_graphs // max(num_measured, 1))


def _prefill_lengths(limits: StepLimits) -> list[int]:
    """Lengths of rows that together take all tokens of a step."""
    lengths: list[int] = []
    left = limits.max_num_batched_tokens
    while left and len(lengths) < limits.max_num_seqs:
        lengths.append(min(left, limits.max_model_len))
        left -= lengths[-1]
    return lengths


def _decodes(limits: StepLimits, num_blocks: Callable[[int], int]) -> list[ScheduledRow]:
    """The most rows that a step may have, of one token each, with the most drafts."""
    drafts, more = divmod(limits.most_choices - limits.max_num_seqs, limits.max_num_seqs)
    rows = [_row(i, 1 + drafts + (i < more), num_blocks) for i in range(limits.max_num_seqs)]
    return [row._replace(num_drafts=len(row.token_ids) - 1, scoring=None) for row in rows]


def _row(number: int, length: int, num_blocks: Callable[[int], int]) -> ScheduledRow:
    return ScheduledRow(
        request_id=str(number),
        token_ids=(0,) * length,
        start=0,
        block_ids=(0,) * num_blocks(length),
        adapter_key=_KEY,
        adapter_digest=_KEY,
        sampling=SamplingParams(
            max_tokens=1,
            temperature=1.0,
            top_p=0.9,
            presence_penalty=1.0,
            logprobs=MOST_TOP_LOGPROBS,
        ),
        scoring=Scoring(0, (0,) * (length - 1), MOST_TOP_LOGPROBS) if length > 1 else None,
    )
