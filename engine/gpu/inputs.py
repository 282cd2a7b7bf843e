"""Puts a step as ints into one block of memory, for one copy to the device, and views it there.

The places of the ints depend on the step's shape only, so that a captured graph finds them again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.decodes import Decodes
from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import Batch, ScheduledRow
from engine.steps.scoring import ScoredTokens
from engine.steps.segments import Tables, find_firsts, find_segments
from engine.steps.verification import single_rows
from kernels.block import BLOCK
from kernels.tiles import MAX_RANK
from kernels.work import (
    MOST_DECODE_ITEMS,
    PAIR_ROWS,
    SPLIT_KEYS,
    AttentionWork,
    Decode,
    LoRAWork,
    decode_queries,
)
from lora.batch import DeviceTables, Segment
from lora.packed import PackedForm

Ints = npt.NDArray[np.int32]
_Fields = Mapping[str, Ints]
_M = TypeVar("_M", Ints, torch.Tensor)

_ALIGNED_INTS = 4
_BLOCK_INTS = BLOCK.itemsize // 4
_DECODE_INTS = len(Decode._fields)
DECODE_BLOCK_ROWS, PREFILL_BLOCK_ROWS = 16, 64
_LEAST_PREFILL_SEGMENT = 64
_OF_ATTENTION = (
    *("query_starts", "seq_lens", "block_starts"),
    *("num_decode_items", "num_prefill_items"),
)
_OF_TOKENS = ("input_ids", "sources", "positions", "slots")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest sizes of a step.

    prefill_queries: queries in a tile of the prefill attention.
    sliding_window: the widest one of the layers, None if a layer has none.
    max_num_drafts: drafts that a step of max_num_seqs rows may have; each row less leaves room for
    one more. The scheduler must not plan more.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_queries: int
    sliding_window: int | None = None
    max_num_drafts: int = 0

    @property
    def most_tokens(self) -> int:
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def most_choices(self) -> int:
        """Most tokens that a step chooses: one for each row, and one behind each draft."""
        return min(self.max_num_seqs + self.max_num_drafts, self.most_tokens)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a step, which decides where its ints lie. num_tokens, num_rows: with padding.

    num_rows: places for rows, and for the tokens that they choose; each draft takes one as well.
    block_rows: see LoRAWork; 0 in a step without adapters.
    num_prefill_items: most items of the prefill attention.
    has_decodes: whether rows may decode; if not, no kernel is launched for such rows.
    """

    num_tokens: int
    num_rows: int
    block_rows: int = 0
    num_prefill_items: int = 0
    has_decodes: bool = True

    @classmethod
    def of_decodes(cls, num_tokens: int, has_lora: bool) -> "StepShape":
        """The shape of a step whose rows each have one token beside their drafts."""
        return cls(num_tokens, num_tokens, DECODE_BLOCK_ROWS if has_lora else 0)

    @property
    def has_lora(self) -> bool:
        return self.block_rows > 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device. See `kernels.reference.embed` for input_ids and sources.

    input_ids, sources, positions, slots: [T] int32.   logits_indices: [rows] int32, the tokens
    whose logits are wanted.
    """

    input_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits_indices: torch.Tensor
    attention: AttentionWork
    lora: LoRAWork | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Part of a step that the host keeps until the step's tokens come back.

    num_ints: size of the part of the block that was filled.
    choosing: what each token that is chosen depends on, as a row without drafts, in the order of
    `logits_indices`.
    sources: for each of these rows, the place of its pending token among those that the previous
    step chooses, if penalties must count it; else -1.
    segments: kept so that the adapters' tables stay in memory.   scored: see ScoredTokens.
    """

    shape: StepShape
    num_ints: int
    choosing: Sequence[ScheduledRow]
    sources: Sequence[int]
    segments: Sequence[Segment]
    adapter_digests: Mapping[int, str]
    scored: ScoredTokens


class StepBuilder:
    """Fills blocks of ints with steps. An engine has one builder.

    arena: [slabs, slab_bytes] uint8 on the device.
    fit: returns the shape to pad a step to, given the step's own shape.
    """

    def __init__(
        self,
        limits: StepLimits,
        form: PackedForm,
        arena: torch.Tensor,
        tables: Tables,
        fit: Callable[[StepShape], StepShape],
    ) -> None:
        self.limits = limits
        self.layout = form.layout
        self.base_revision = form.base_revision
        self.tables = tables
        self.fit = fit
        self.adapters = arena.view(getattr(torch, form.dtype))
        shape = self.layout.shape
        self._decode_queries = decode_queries(shape.num_heads, shape.num_kv_heads)
        self._most_blocks = limits.max_num_seqs * self.layout.num_blocks(limits.max_model_len)

    @property
    def most_ints(self) -> int:
        """Most ints that any step takes."""
        rows, num_tokens = self.limits.most_choices, self.limits.most_tokens
        num_prefill_items = num_tokens // self.limits.prefill_queries + rows
        largest = StepShape(num_tokens, rows, DECODE_BLOCK_ROWS, num_prefill_items)
        return aligned(_num_ints(largest, self.limits) + self._most_blocks)

    def build(
        self,
        batch: Batch,
        memory: Ints,
        previous: Mapping[tuple[str, int], int],
        shape: StepShape | None = None,
    ) -> StepPlan:
        """Fill `memory` with a step.   previous: (request_id, index) -> place of its token among
        those that the previous step chooses.   shape: to pad it to; None for the one that fits.
        """
        rows = batch.rows
        assert len(rows) + sum(row.num_drafts for row in rows) <= self.limits.most_choices
        firsts = find_firsts(rows)
        segments, digests = find_segments(rows, firsts[:-1], self.tables, self.base_revision)
        if shape is None:
            shape = self._shape(rows, firsts[-1], segments)
            if all(row.scoring is None for row in rows):  # steps that score have no graph
                shape = self.fit(shape)
        fields = _fields(shape, self.limits, memory)
        choosing: list[ScheduledRow] = []
        places: list[int] = []
        sources: list[int] = []
        for row, end in zip(rows, firsts[1:], strict=True):
            if row.sampling is not None:
                choosing += single_rows(row)
                places += range(end - 1 - row.num_drafts, end)
                sources += [_source(row, previous)] * (1 + row.num_drafts)
        _put(fields["logits_indices"], places)
        self._put_tokens(rows, firsts, fields, previous)
        block_starts = self._put_blocks(rows, fields["blocks"])
        self._put_attention(rows, firsts, block_starts, fields)
        self._put_decodes(rows, firsts, block_starts, fields)
        if shape.has_lora:
            _put_lora(segments, firsts[-1], shape, fields)
        return StepPlan(
            shape=shape,
            num_ints=aligned(_num_ints(shape, self.limits) + block_starts[-1]),
            choosing=choosing,
            sources=sources,
            segments=segments,
            adapter_digests=digests,
            scored=ScoredTokens.of(rows, firsts[: len(rows)]),
        )

    def views(self, shape: StepShape, block: torch.Tensor) -> StepInputs:
        """View a step of this shape in `block`, on the device."""
        fields = _fields(shape, self.limits, block)
        attention = AttentionWork(
            **{name: fields[name] for name in _OF_ATTENTION},
            blocks=fields["blocks"][: self._most_blocks],
            decodes=fields["decodes"].view(-1, _DECODE_INTS),
            decode_items=fields["decode_items"].view(-1, 2),
            prefill_items=fields["prefill_items"].view(-1, 2),
            prefill_queries=self.limits.prefill_queries,
        )
        lora = None
        if shape.has_lora:
            lora = LoRAWork(
                arena=self.adapters,
                blocks=fields["lora_blocks"].view(-1, _BLOCK_INTS),
                pairs=fields["lora_pairs"].view(-1, 2),
                counts=fields["lora_counts"],
                block_rows=shape.block_rows,
            )
        own = {name: fields[name] for name in (*_OF_TOKENS, "logits_indices")}
        return StepInputs(**own, attention=attention, lora=lora)

    def _shape(
        self, rows: Sequence[ScheduledRow], num_tokens: int, segments: Sequence[Segment]
    ) -> StepShape:
        prefills = [len(row.token_ids) for row in rows if not _decodes(row)]
        if not prefills:
            return StepShape.of_decodes(num_tokens, bool(segments))
        is_long = any(s.end - s.start >= _LEAST_PREFILL_SEGMENT for s in segments)
        block_rows = PREFILL_BLOCK_ROWS if is_long else DECODE_BLOCK_ROWS
        return StepShape(
            num_tokens=num_tokens,
            num_rows=len(rows) + sum(row.num_drafts for row in rows),
            block_rows=block_rows if segments else 0,
            num_prefill_items=sum(-(-n // self.limits.prefill_queries) for n in prefills),
            has_decodes=len(prefills) < len(rows),
        )

    def _put_tokens(
        self,
        rows: Sequence[ScheduledRow],
        firsts: Sequence[int],
        fields: _Fields,
        previous: Mapping[tuple[str, int], int],
    ) -> None:
        size = self.layout.block_size
        sources = [-1] * firsts[-1]
        positions: list[int] = []
        slots: list[int] = []
        for row, end in zip(rows, firsts[1:], strict=True):
            last = end - 1 - row.num_drafts
            if row.token_ids[-1 - row.num_drafts] == PENDING_TOKEN:
                sources[last] = previous[row.request_id, row.index]
            own = range(row.start, row.start + len(row.token_ids))
            positions += own
            slots += [row.block_ids[p // size] * size + p % size for p in own]
        _put(fields["input_ids"], [token for row in rows for token in row.token_ids])
        _put(fields["sources"], sources, padding=-1)
        _put(fields["positions"], positions)
        _put(fields["slots"], slots, padding=-1)

    def _put_attention(
        self,
        rows: Sequence[ScheduledRow],
        firsts: Sequence[int],
        block_starts: Sequence[int],
        fields: _Fields,
    ) -> None:
        """Put the work items of attention: which rows attend to which keys."""
        prefills: list[tuple[int, int]] = []
        for number, row in enumerate(rows):
            if not _decodes(row):
                tiles = -(-len(row.token_ids) // self.limits.prefill_queries)
                prefills += [(number, tile) for tile in range(tiles)]
        _put(fields["query_starts"], firsts, padding=firsts[-1])
        _put(fields["seq_lens"], [row.end for row in rows])
        _put(fields["block_starts"], block_starts[:-1])
        _put_some(fields["prefill_items"], prefills)
        _put(fields["num_prefill_items"], len(prefills))

    def _put_decodes(
        self,
        rows: Sequence[ScheduledRow],
        firsts: Sequence[int],
        block_starts: Sequence[int],
        fields: _Fields,
    ) -> None:
        num_parts = len(fields["num_decode_items"])
        num_places = len(fields["decodes"]) // _DECODE_INTS
        window = self.limits.sliding_window
        decodes = Decodes(num_places, num_parts, self._decode_queries, window)
        for row, first, block_start in zip(rows, firsts, block_starts, strict=False):
            if _decodes(row):
                decodes.add(first, row.start, len(row.token_ids), block_start)
        _put(fields["decodes"], decodes.records)
        parts = decodes.items()
        rooms = fields["decode_items"].reshape(num_parts, -1)
        for room, items in zip(rooms, parts, strict=True):
            _put_some(room, items)
        _put(fields["num_decode_items"], [len(items) for items in parts])

    def _put_blocks(self, rows: Sequence[ScheduledRow], field: Ints) -> list[int]:
        """Put every row's blocks, one after the other; return where each row's begin, and the end
        of all.
        """
        starts = [0]
        for row in rows:
            needed = self.layout.num_blocks(row.end)
            field[starts[-1] :][:needed] = row.block_ids[:needed]
            starts.append(starts[-1] + needed)
        return starts


def _fields(shape: StepShape, limits: StepLimits, memory: _M) -> dict[str, _M]:
    """Views of a step's ints by name. The rows' blocks come last, since their number varies."""
    fields, at = {}, 0
    for name, size in _sizes(shape, limits).items():
        fields[name] = memory[at : at + size]
        at += aligned(size)
    return fields | {"blocks": memory[at:]}


def _num_ints(shape: StepShape, limits: StepLimits) -> int:
    """Number of a step's ints before the rows' blocks."""
    return sum(map(aligned, _sizes(shape, limits).values()))


def _put(field: Ints, values: npt.ArrayLike, padding: int = 0) -> None:
    """Fill a field with `values`, and the rest of it with `padding`."""
    field[_put_some(field, values) :] = padding


def _put_some(field: Ints, values: npt.ArrayLike) -> int:
    """Put `values` at the start of a field and leave the rest alone; return how many ints.

    It is enough for fields whose values are counted by another field.
    """
    ints = np.asarray(values, dtype=np.int32).reshape(-1)
    field[: len(ints)] = ints
    return len(ints)


def _sizes(shape: StepShape, limits: StepLimits) -> dict[str, int]:
    """Most ints of each field in a step of this shape."""
    tokens, rows = shape.num_tokens, shape.num_rows
    num_parts, part_items = _decode_parts(rows, limits) if shape.has_decodes else (1, 0)
    sizes = {
        **dict.fromkeys(_OF_TOKENS, tokens),
        **dict.fromkeys(("logits_indices", "seq_lens", "block_starts"), rows),
        "query_starts": rows + 1,
        "decodes": _DECODE_INTS * rows if shape.has_decodes else 0,
        "decode_items": 2 * num_parts * part_items,
        "num_decode_items": num_parts,
        "prefill_items": 2 * shape.num_prefill_items,
        "num_prefill_items": 1,
    }
    if shape.has_lora:
        # A row may have tokens before its adapter's start and after it, in two blocks.
        num_blocks = 2 * rows + tokens // shape.block_rows
        sizes |= {
            "lora_blocks": _BLOCK_INTS * num_blocks,
            "lora_pairs": 2 * num_blocks * (MAX_RANK // PAIR_ROWS),
            "lora_counts": 2,
        }
    return sizes


def _decode_parts(num_rows: int, limits: StepLimits) -> tuple[int, int]:
    """Number of parts of decodes, and of items that each has room for; see AttentionWork."""
    splits = -(-limits.max_model_len // SPLIT_KEYS)
    most_rows = max(1, MOST_DECODE_ITEMS // splits)
    part_rows = -(-num_rows // -(-num_rows // most_rows))
    return -(-num_rows // part_rows), part_rows * splits


def _put_lora(
    segments: Sequence[Segment], num_tokens: int, shape: StepShape, fields: _Fields
) -> None:
    blocks: list[tuple[int, ...]] = []
    pairs: list[tuple[int, int]] = []
    for start, end, tables in _with_base(segments, num_tokens):
        for first in range(start, end, shape.block_rows):
            tokens = first, min(shape.block_rows, end - first)
            if tables is None:
                blocks.append((*tokens, 0, 0, 0))
                continue
            pairs += [(len(blocks), pair) for pair in range(tables.num_pairs)]
            table, scales = tables.tile_table, tables.scales
            blocks.append((*tokens, table.shape[2], table.data_ptr(), scales.data_ptr()))
    _put_some(fields["lora_blocks"], np.array(blocks, dtype=BLOCK).view(np.int32))
    _put_some(fields["lora_pairs"], pairs)
    _put(fields["lora_counts"], (len(blocks), len(pairs)))


def _with_base(
    segments: Sequence[Segment], num_tokens: int
) -> Iterator[tuple[int, int, DeviceTables | None]]:
    """Yield (start, end, tables) for all tokens; those between segments are the base model's."""
    at = 0
    for segment in segments:
        yield at, segment.start, None
        yield segment.start, segment.end, segment.tables
        at = segment.end
    yield at, num_tokens, None


def _decodes(row: ScheduledRow) -> bool:
    """Whether all of a row's tokens but the first are drafts."""
    return len(row.token_ids) == 1 + row.num_drafts


def _source(row: ScheduledRow, previous: Mapping[tuple[str, int], int]) -> int:
    """Place of the pending token that penalties must count, -1 if there is none."""
    is_pending = bool(row.output_token_ids) and row.output_token_ids[-1] == PENDING_TOKEN
    return previous[row.request_id, row.index] if is_pending else -1


def aligned(num_ints: int) -> int:
    """The next place, from `num_ints` on, at which 64-bit numbers and wide loads may begin."""
    return -(-num_ints // _ALIGNED_INTS) * _ALIGNED_INTS
