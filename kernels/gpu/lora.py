"""LoRA on arena tiles: shrink into planes, expand from them. Reference: `kernels.reference`."""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.expansion import (
    PLANE_COLUMNS,
    ROWS_OF_SMALL_BLOCK,
    TILE_ROWS,
    add_other_pairs,
    b_start,
    block_of,
    by_number,
    dot,
    first_line,
    load_pair,
    load_planes,
    look_up,
    pair_mask,
    pair_of,
    pair_offsets,
    places_of,
    tile_line,
)
from kernels.tiles import MAX_RANK
from kernels.work import CHUNK_FEATURES, PAIR_ROWS, Delta, LoRAWork, Site

_PAIR_ROWS = tl.constexpr(PAIR_ROWS)
_CHUNK = tl.constexpr(CHUNK_FEATURES)

# (features of a step, warps, stages) by most tokens of a block. With 16 tokens all loads of a chunk
# are in flight at once.
_SHRINK = {16: (128, 4, 4), 64: (128, 4, 3)}

_EXPAND_COLUMNS = tl.constexpr(128)
_EXPAND_WARPS = 4


# ---- shrink ----


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["counts"],
)
def _shrink(
    x,
    planes,
    arena,
    blocks,
    pairs,
    counts,
    num_tokens,
    x_stride,
    line,
    PROJECTIONS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    CHUNKS: tl.constexpr = (IN_FEATURES + _CHUNK - 1) // _CHUNK
    COLUMNS: tl.constexpr = PROJECTIONS * PLANE_COLUMNS
    num_items = tl.load(counts + 1) * (PROJECTIONS * CHUNKS)
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        chunk = item % CHUNKS
        number = item // CHUNKS % PROJECTIONS
        block, pair = pair_of(pairs, item // (CHUNKS * PROJECTIONS))
        first, count, depth, table, scales = block_of(blocks, block)
        tiles = tile_line(table, depth, line + number)
        place_0, place_1 = places_of(tiles, depth, pair)
        if place_0 >= 0:
            rank_mask = pair_mask(place_0, place_1)
            row = tl.arange(0, BLOCK_ROWS)
            rows, row_mask = first + row, row < count
            a_rows = arena + pair_offsets(arena, place_0, place_1, IN_FEATURES)
            x_rows = x + rows * x_stride
            h = tl.zeros((BLOCK_ROWS, _PAIR_ROWS), tl.float32)
            for start in range(0, tl.minimum(_CHUNK, IN_FEATURES - chunk * _CHUNK), BLOCK_K):
                k = chunk * _CHUNK + start + tl.arange(0, BLOCK_K)
                x_mask, a_mask = row_mask[:, None], rank_mask[None, :]
                if IN_FEATURES % BLOCK_K != 0:
                    x_mask &= (k < IN_FEATURES)[None, :]
                    a_mask &= (k < IN_FEATURES)[:, None]
                left = tl.load(x_rows[:, None] + k[None, :], mask=x_mask, other=0.0)
                right = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
                h = dot(left, right, h)
            scale = scales.to(tl.pointer_type(tl.float32)) + line + number
            column = number * PLANE_COLUMNS + pair * _PAIR_ROWS + tl.arange(0, _PAIR_ROWS)
            plane = planes + chunk.to(tl.int64) * num_tokens * COLUMNS
            tl.store(
                plane + rows[:, None] * COLUMNS + column[None, :],
                h * tl.load(scale),
                mask=row_mask[:, None] & rank_mask[None, :],
            )


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["counts"],
)
def _sum_planes(
    planes,
    blocks,
    pairs,
    counts,
    num_tokens,
    line,
    PROJECTIONS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    COLUMNS: tl.constexpr = PROJECTIONS * PLANE_COLUMNS
    num_items = tl.load(counts + 1) * PROJECTIONS
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        number = item % PROJECTIONS
        block, pair = pair_of(pairs, item // PROJECTIONS)
        first, count, depth, table, _ = block_of(blocks, block)
        tiles = tile_line(table, depth, line + number)
        place_0, place_1 = places_of(tiles, depth, pair)
        row = tl.arange(0, BLOCK_ROWS)
        rows, row_mask = first + row, row < count
        mask = row_mask[:, None] & pair_mask(place_0, place_1)[None, :]
        column = number * PLANE_COLUMNS + pair * _PAIR_ROWS
        h = load_planes(planes, num_tokens, rows, column, mask, NUM_PLANES, COLUMNS)
        columns = column + tl.arange(0, _PAIR_ROWS)
        tl.store(planes + rows[:, None] * COLUMNS + columns[None, :], h, mask=mask)


def shrink(x: torch.Tensor, work: LoRAWork, site: Site) -> Delta:
    """planes[c, t, s * MAX_RANK + j] = scale * x[t, chunk c] @ A[j, chunk c].

    x: [T, in_features] in the adapters' dtype. The planes of large blocks are summed here, in
    order, into one; otherwise every tile of an expand would sum them again, for many tokens.
    Persistent over (pair of tiles, projection, chunk), each written once. Bound by bytes: A's, once
    for every block of tokens. Reference: `kernels.reference`.
    """
    assert x.dtype == work.arena.dtype
    columns = len(site.projections) * MAX_RANK
    planes = x.new_empty((site.num_chunks, len(x), columns), dtype=torch.float32)
    block_k, num_warps, num_stages = _SHRINK[work.block_rows]
    launch.persistent(
        _shrink,
        x,
        planes,
        work.arena,
        work.blocks,
        work.pairs,
        work.counts,
        len(x),
        x.stride(0),
        first_line(site),
        PROJECTIONS=len(site.projections),
        IN_FEATURES=site.in_features,
        BLOCK_ROWS=work.block_rows,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if site.num_chunks == 1 or work.block_rows <= ROWS_OF_SMALL_BLOCK:
        return Delta(planes, work, site)
    launch.persistent(
        _sum_planes,
        planes,
        work.blocks,
        work.pairs,
        work.counts,
        len(x),
        first_line(site),
        PROJECTIONS=len(site.projections),
        NUM_PLANES=site.num_chunks,
        BLOCK_ROWS=work.block_rows,
        num_warps=4,
    )
    return Delta(planes[:1], work, site)


# ---- expand ----


@triton.jit
def _projection(tile, TILES_0: tl.constexpr, TILES_1: tl.constexpr):
    """(number, first tile) of the projection that a tile of columns is in."""
    number = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_0 + TILES_1).to(tl.int32)
    return number, by_number(number, 0, TILES_0, TILES_0 + TILES_1)


@triton.jit
def _look_up(
    blocks,
    item,
    num_items,
    line,
    TILES_0: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`look_up` of an item's tile of rows and projection."""
    number, _ = _projection(item % TILES, TILES_0, TILES_1)
    return look_up(blocks, item // TILES, item < num_items, line + number, BLOCK_ROWS, ROWS)


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["counts"],
)
def _expand(
    y,
    planes,
    arena,
    blocks,
    counts,
    num_tokens,
    y_stride,
    line,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    COLUMNS: tl.constexpr,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A projection's last tile of columns may be partly empty: no tile reaches into two projections.
    TILES_0: tl.constexpr = (OUT_0 + _EXPAND_COLUMNS - 1) // _EXPAND_COLUMNS
    TILES_1: tl.constexpr = (OUT_1 + _EXPAND_COLUMNS - 1) // _EXPAND_COLUMNS
    TILES: tl.constexpr = TILES_0 + TILES_1 + (OUT_2 + _EXPAND_COLUMNS - 1) // _EXPAND_COLUMNS
    num_items = tl.load(counts) * (BLOCK_ROWS // ROWS) * TILES
    first, count, depth, tiles, place_0, place_1 = _look_up(
        blocks, tl.program_id(0), num_items, line, TILES_0, TILES_1, TILES, BLOCK_ROWS, ROWS
    )
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        number, first_tile = _projection(item % TILES, TILES_0, TILES_1)
        begin = by_number(number, 0, OUT_0, OUT_0 + OUT_1)
        width = by_number(number, OUT_0, OUT_1, OUT_2)
        row = tl.arange(0, ROWS)
        # Rows of the base model are left alone.
        rows, row_mask = first + row, (row < count) & (depth > 0)
        columns = (item % TILES - first_tile) * _EXPAND_COLUMNS + tl.arange(0, _EXPAND_COLUMNS)
        mask = row_mask[:, None] & (columns < width)[None, :]
        at = y + rows[:, None] * y_stride + (begin + columns)[None, :]
        base = tl.load(at, mask=mask, other=0.0)
        h, b = load_pair(
            arena, place_0, place_1, planes, num_tokens, rows, row_mask,
            number * PLANE_COLUMNS, columns, width, B_START, NUM_PLANES, COLUMNS,
        )  # fmt: skip
        own_depth, own_tiles = depth, tiles
        # The next item is looked up while this one's product waits for its operands.
        first, count, depth, tiles, place_0, place_1 = _look_up(
            blocks, item + tl.num_programs(0), num_items, line,
            TILES_0, TILES_1, TILES, BLOCK_ROWS, ROWS,
        )  # fmt: skip
        delta = add_other_pairs(
            dot(h, b, tl.zeros((ROWS, _EXPAND_COLUMNS), tl.float32)), arena, own_tiles, own_depth,
            planes, num_tokens, rows, row_mask,
            number * PLANE_COLUMNS, columns, width, B_START, NUM_PLANES, COLUMNS,
        )  # fmt: skip
        total = base.to(tl.float32) + delta
        tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def expand(y: torch.Tensor, delta: Delta) -> None:
    """y[t] += (sum over c of planes[c, t]) @ B in place, where t has an adapter.

    y: [T, sum of out_features], of at most three projections.
    Persistent over (block of tokens, tile of columns). Bound by bytes: y's, twice, and B's, once
    for every block of tokens. Reference: `kernels.reference`.
    """
    work, site = delta.work, delta.site
    out_0, out_1, out_2 = (*site.out_features, 0, 0)[:3]
    launch.persistent(
        _expand,
        y,
        delta.planes,
        work.arena,
        work.blocks,
        work.counts,
        len(y),
        y.stride(0),
        first_line(site),
        OUT_0=out_0,
        OUT_1=out_1,
        OUT_2=out_2,
        COLUMNS=delta.planes.shape[2],
        B_START=b_start(site),
        NUM_PLANES=delta.planes.shape[0],
        BLOCK_ROWS=work.block_rows,
        ROWS=min(work.block_rows, TILE_ROWS),
        num_warps=_EXPAND_WARPS,
    )
