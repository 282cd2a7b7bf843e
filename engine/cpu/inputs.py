"""Turns a batch of plain ints into the tensors of one forward pass."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NoReturn

import torch

from engine.steps.batch import Batch, ScheduledRow
from engine.steps.scoring import ScoredTokens
from engine.steps.segments import Tables, find_firsts, find_segments
from kernels.cpu.work import AdapterRuns, StepWork
from lora.batch import DeviceTables, Segment, adapter_runs
from lora.packed import PackedForm


@dataclass(frozen=True)
class ForwardInputs:
    """Tensors of one forward pass over T tokens.

    input_ids: [T] int64.   logits_indices: tokens whose logits are wanted, rising, int64.
    wanted_adapters: adapters of those tokens alone, side by side.
    head_adapters: those of them that change the head or the vocabulary.
    embedding_adapters: adapters of all tokens that change the embedding.
    sampled_places, scored_places: places among those tokens, int64: of the tokens behind which rows
    choose one (the last known one and the drafts), and of the tokens before the `scored` ones.
    adapter_digests: by row number, of the adapter that `work` applies to it.
    """

    input_ids: torch.Tensor
    logits_indices: torch.Tensor
    work: StepWork
    wanted_adapters: AdapterRuns
    head_adapters: "HeadAdapters"
    embedding_adapters: AdapterRuns
    sampled_places: torch.Tensor
    scored_places: torch.Tensor
    scored: ScoredTokens
    adapter_digests: Mapping[int, str]


@dataclass(frozen=True)
class HeadAdapters:
    """Adapters that change the head or the vocabulary.

    segments: of the tokens whose logits are wanted, by their places among those.
    elements: the arena in the adapters' dtype.
    """

    segments: Sequence[Segment]
    elements: torch.Tensor

    def among(self, places: Sequence[int]) -> AdapterRuns:
        """Adapters of the tokens in these places alone, which rise, side by side."""
        return adapter_runs(_among(places, self.segments), self.elements)

    def num_added(self, places: Sequence[int]) -> list[int]:
        """How many tokens each one's adapter adds to the vocabulary. places: as in `among`."""
        found = [0] * len(places)
        for segment in _among(places, self.segments):
            count = segment.end - segment.start
            found[segment.start : segment.end] = [segment.tables.num_added] * count
        return found


def no_tables(key: str) -> NoReturn:
    """The look-up of a model without adapters."""
    raise AssertionError(f"this model has no adapters: {key}")


class InputBuilder:
    """Builds inputs. arena: [slabs, slab_bytes] uint8.   form: of its adapters, and of its KV."""

    def __init__(self, arena: torch.Tensor, form: PackedForm, tables: Tables = no_tables) -> None:
        self.layout = form.layout
        self.base_revision = form.base_revision
        self.tables = tables
        self.elements = arena.view(getattr(torch, form.dtype))
        self.kv = self.elements[:, : self.layout.kv_block_elems]

    def build(self, batch: Batch) -> ForwardInputs:
        rows = batch.rows
        starts = find_firsts(rows)
        segments, adapter_digests = find_segments(
            rows, starts[:-1], self.tables, self.base_revision
        )
        sampled = [
            token
            for end, row in zip(starts[1:], rows, strict=True)
            if row.sampling
            for token in range(end - 1 - row.num_drafts, end)
        ]
        scored = ScoredTokens.of(rows, starts[:-1])
        wanted = sorted([*sampled, *scored.indices])
        of_wanted = _among(wanted, segments)
        of_head = [segment for segment in of_wanted if _changes_head(segment.tables)]
        of_embedding = [segment for segment in segments if segment.tables.has_embedding]
        blocks = [self._blocks(row) for row in rows]
        work = StepWork(
            positions=_longs([p for row in rows for p in _positions(row)]),
            slots=_longs([s for row in rows for s in self._slots(row)]),
            query_starts=_ints(starts),
            seq_lens=_ints([row.start + len(row.token_ids) for row in rows]),
            block_starts=_ints([0, *accumulate(map(len, blocks))]),
            blocks=_ints([b for row in blocks for b in row]),
            kv=self.kv,
            adapters=adapter_runs(segments, self.elements),
        )
        return ForwardInputs(
            input_ids=_longs([t for row in rows for t in row.token_ids]),
            logits_indices=_longs(wanted),
            work=work,
            wanted_adapters=adapter_runs(of_wanted, self.elements),
            head_adapters=HeadAdapters(of_head, self.elements),
            embedding_adapters=adapter_runs(of_embedding, self.elements),
            sampled_places=_longs([bisect_left(wanted, token) for token in sampled]),
            scored_places=_longs([bisect_left(wanted, token) for token in scored.indices]),
            scored=scored,
            adapter_digests=adapter_digests,
        )

    def _blocks(self, row: ScheduledRow) -> tuple[int, ...]:
        """Blocks that hold what the row attends to; the row may have more blocks."""
        return row.block_ids[: self.layout.num_blocks(row.start + len(row.token_ids))]

    def _slots(self, row: ScheduledRow) -> list[int]:
        size = self.layout.block_size
        return [row.block_ids[p // size] * size + p % size for p in _positions(row)]


def _changes_head(tables: DeviceTables) -> bool:
    return tables.has_head or tables.num_added > 0


def _among(tokens: Sequence[int], segments: Sequence[Segment]) -> list[Segment]:
    """Segments of these tokens alone, by their places in the list."""
    left = []
    for segment in segments:
        start, end = bisect_left(tokens, segment.start), bisect_left(tokens, segment.end)
        if start < end:
            left.append(replace(segment, start=start, end=end))
    return left


def _positions(row: ScheduledRow) -> range:
    return range(row.start, row.start + len(row.token_ids))


def _longs(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
