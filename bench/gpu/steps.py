"""Steps as the engine gives them to a device: rows of requests, and their tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from bench.gpu.machine import Machine
from engine.gpu.inputs import StepBuilder, StepInputs, StepLimits
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from kernels.gpu import ops
from lora.batch import DeviceTables
from lora.packed import PackedForm

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def make_rows(
    lengths: Sequence[tuple[int, int]],
    blocks: Sequence[Sequence[int]],
    digests: Sequence[str] = (),
) -> tuple[ScheduledRow, ...]:
    """Make the rows of a step, each of which chooses a token greedily.

    lengths: (positions before, tokens) of each row.   blocks: blocks of each row, for both.

    digests: adapters, each given to as many adjacent rows.
    """
    rows = []
    for number, ((start, count), own) in enumerate(zip(lengths, blocks, strict=True)):
        digest = digests[number * len(digests) // len(lengths)] if digests else None
        rows.append(
            ScheduledRow(
                request_id=str(number),
                token_ids=tuple(1 + (number + i) % 97 for i in range(count)),
                start=start,
                block_ids=tuple(own),
                adapter_key=digest,
                adapter_digest=digest,
                sampling=_GREEDY,
            )
        )
    return tuple(rows)


def deal_blocks(first: int, num_rows: int, per_row: int) -> list[list[int]]:
    """Deal the slabs from `first` on to rows, in random order."""
    order = np.random.default_rng(0).permutation(num_rows * per_row) + first
    blocks: list[list[int]] = order.reshape(num_rows, per_row).tolist()
    return blocks


def make_step(
    machine: Machine, form: PackedForm, slabs: torch.Tensor, rows: tuple[ScheduledRow, ...]
) -> StepInputs:
    """Make a step's tensors without adapters, laid out as in the engine; decodes as in a captured
    graph.

    slabs: [.., slab_bytes] uint8, the arena.
    """
    no_adapters: dict[str, tuple[int, DeviceTables]] = {}
    shape = form.layout.shape
    limits = StepLimits(
        max_num_seqs=len(rows),
        max_num_batched_tokens=sum(len(row.token_ids) for row in rows),
        max_model_len=max(row.start + len(row.token_ids) for row in rows),
        prefill_queries=ops.prefill_queries(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, machine.dtype, machine.there
        ),
    )
    builder = StepBuilder(limits, form, slabs, no_adapters.__getitem__, lambda shape: shape)
    memory = np.zeros(builder.most_ints, dtype=np.int32)
    plan = builder.build(Batch(1, rows), memory, {})
    ints = torch.from_numpy(memory).to(machine.there)
    return builder.views(plan.shape, ints)
