"""A batch of plain ints turned into the tensors of one forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch, ScheduledRow
from engine.segments import Tables, find_firsts, find_segments
from lora.batch import LoRABatch
from lora.packed import PackedForm

DECODE_GROUP = 8
"""Decodes that share one padded gather: sorted by length, so little is padded.

8: best pure-torch variant of those tried, 157 ms against 247 unsorted (135M shape, 32 rows, one
thread).
"""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """rows: [B] indices of tokens.   blocks: [B, blocks] int64.   seq_lens: [B] int64."""

    rows: torch.Tensor
    blocks: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [row, row + length) are positions start, start + 1, ... of one sequence."""

    row: int
    length: int
    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ForwardInputs:
    """kv: [slabs, layers, 2, kv heads, block_size, head_dim], the arena as KV blocks.

    input_ids, positions, slot_mapping: [T] int64.   logits_indices: tokens whose row samples.
    adapter_digests: by row number, of the tables that `lora` applies to it.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_indices: torch.Tensor
    decodes: Sequence[DecodeGroup]
    prefills: Sequence[PrefillChunk]
    kv: torch.Tensor
    lora: LoRABatch
    adapter_digests: Mapping[int, str]


class InputBuilder:
    """Builds a step's inputs on the arena's device.

    arena: [slabs, slab_bytes] uint8.   form: of the adapters in it, and of its KV.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        form: PackedForm,
        tables: Tables,
    ) -> None:
        self.layout = form.layout
        self.base_revision = form.base_revision
        self.device = arena.device
        self.tables = tables
        per_slab = arena.view(getattr(torch, form.dtype))[:, : self.layout.kv_block_elems]
        self.kv = per_slab.unflatten(1, self.layout.kv_shape)

    def build(self, batch: Batch) -> ForwardInputs:
        rows = batch.rows
        *firsts, _ = find_firsts(rows)
        decodes = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        segments, adapter_digests = find_segments(rows, firsts, self.tables, self.base_revision)
        return ForwardInputs(
            input_ids=self._ints([t for row in rows for t in row.token_ids]),
            positions=self._ints([p for row in rows for p in _positions(row)]),
            slot_mapping=self._ints([s for row in rows for s in self._slots(row)]),
            logits_indices=self._ints(
                [
                    first + len(row.token_ids) - 1
                    for first, row in zip(firsts, rows, strict=True)
                    if row.sampling is not None
                ]
            ),  # fmt: skip
            decodes=self._decode_groups([(firsts[i], rows[i]) for i in decodes]),
            prefills=[
                PrefillChunk(first, len(row.token_ids), row.start, row.block_ids)
                for first, row in zip(firsts, rows, strict=True)
                if len(row.token_ids) > 1
            ],
            kv=self.kv,
            lora=LoRABatch(segments),
            adapter_digests=adapter_digests,
        )

    def _decode_groups(self, decodes: list[tuple[int, ScheduledRow]]) -> list[DecodeGroup]:
        decodes.sort(key=lambda item: item[1].start)
        groups = []
        for at in range(0, len(decodes), DECODE_GROUP):
            group = decodes[at : at + DECODE_GROUP]
            depth = max(self.layout.num_blocks(row.start + 1) for _, row in group)
            # Padded with a row's own last block: a row reads nobody else's memory, masked or not.
            blocks = [(row.block_ids + row.block_ids[-1:] * depth)[:depth] for _, row in group]
            groups.append(
                DecodeGroup(
                    rows=self._ints([first for first, _ in group]),
                    blocks=torch.tensor(blocks, device=self.device),
                    seq_lens=self._ints([row.start + 1 for _, row in group]),
                )
            )
        return groups

    def _slots(self, row: ScheduledRow) -> list[int]:
        size = self.layout.block_size
        return [row.block_ids[p // size] * size + p % size for p in _positions(row)]

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _positions(row: ScheduledRow) -> range:
    return range(row.start, row.start + len(row.token_ids))
