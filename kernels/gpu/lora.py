"""LoRA on arena tiles: shrink into planes, expand from them. Meaning: `kernels.reference`.

`add_expanded` and what it stands on are also inlined into the kernels that expand on the way.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from kernels.work import CHUNK_FEATURES, PAIR_ROWS, Delta, LoRAWork, Site

TILE_ROWS = 32
"""Most tokens that one program expands for. With 64, `tl.dot` is a WGMMA whose left operand is in
registers, which ptxas before 13.3 miscompiles (triton issue 9433); with 32 it is an `mma.sync`.
"""

_RANK_ROWS = tl.constexpr(RANK_ROWS)
_PAIR_ROWS = tl.constexpr(PAIR_ROWS)
_CHUNK = tl.constexpr(CHUNK_FEATURES)
_UNIT_BITS = tl.constexpr(8 * ADDRESS_UNIT_BYTES)

_ROWS_OF_SMALL_BLOCK = 16

# (features of a step, warps, stages) by most tokens of a block. 16: a chunk is on its way at once.
_SHRINK = {16: (128, 4, 4), 64: (128, 4, 3)}
_SHRINK_PROGRAMS = 6

# Programs of a multiprocessor, by most tokens of a block: no more than its registers hold at once,
# or the last ones would run when all others are through.
_EXPAND_PROGRAMS = {16: 6, 64: 4}
_EXPAND_COLUMNS = 128
_EXPAND_WARPS = 4


# ---- parts: of the expanding kernels, too ----


@triton.jit
def rows_of(blocks, tile, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """(first token, tokens, slot) of a tile of rows: a block is cut into BLOCK_ROWS / ROWS."""
    TILES: tl.constexpr = BLOCK_ROWS // ROWS
    block = blocks + 3 * (tile // TILES).to(tl.int64)
    skipped = tile % TILES * ROWS
    count = tl.load(block + 1) - skipped
    # A tile without tokens has nothing to look up.
    slot = tl.where(count > 0, tl.load(block + 2), -1).to(tl.int64)
    return tl.load(block).to(tl.int64) + skipped, count, slot


@triton.jit
def by_number(number, zeroth, first, second):
    """One of three, by a projection's number among its site's."""
    return tl.where(number == 0, zeroth, tl.where(number == 1, first, second))


@triton.jit
def tile_line(tile_tables, depths, slot, line):
    """(address, length) of a line of places in a slot's tile table; slot -1 has an empty one."""
    has_adapter = slot >= 0
    depth = tl.load(depths + slot, mask=has_adapter, other=0)
    table = tl.load(tile_tables + slot, mask=has_adapter, other=0)
    return table.to(tl.pointer_type(tl.int32)) + tl.cast(line, tl.int64) * depth, depth


@triton.jit
def place_of(line, depth, index):
    """Tile `index` of a line, -1 past its end."""
    return tl.load(line + index, mask=index < depth, other=-1)


@triton.jit
def pair_offsets(arena, place_0, place_1, row_elems):
    """Elements from the arena's first to each row of two tiles, [16] int64."""
    row = tl.arange(0, _PAIR_ROWS)
    place = tl.where(row < _RANK_ROWS, place_0, place_1).to(tl.int64)
    unit: tl.constexpr = _UNIT_BITS // arena.dtype.element_ty.primitive_bitwidth
    return place * unit + (row % _RANK_ROWS) * row_elems


@triton.jit
def pair_mask(place_1):
    """Which rows of a pair are there, [16]: the second tile may be none."""
    return (tl.arange(0, _PAIR_ROWS) < _RANK_ROWS) | (place_1 >= 0)


@triton.jit
def load_planes(
    planes, num_tokens, rows, column, mask, NUM_PLANES: tl.constexpr, COLUMNS: tl.constexpr
):
    """16 columns from `column` on, summed over the planes in order, [rows, 16] float32."""
    columns = column + tl.arange(0, _PAIR_ROWS)
    at = planes + rows[:, None] * COLUMNS + columns[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    for _ in tl.static_range(1, NUM_PLANES):
        at += tl.cast(num_tokens, tl.int64) * COLUMNS
        h += tl.load(at, mask=mask, other=0.0)
    return h


@triton.jit
def dot(left, right, acc, UPCAST: tl.constexpr):
    """acc + left @ right. In Triton's interpreter bfloat16 is an integer, so it is cast."""
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def add_expanded(
    acc,
    arena,
    line,
    depth,
    planes,
    num_tokens,
    rows,
    row_mask,
    column,
    out_columns,
    out_features,
    IN_FEATURES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """acc + (sum of planes) @ B of the line's tiles, for columns [..] of its projection.

    acc: [rows, out_columns] float32.   column: the projection's first in the planes.
    """
    column_mask = out_columns < out_features
    pair = 0
    place_0 = place_of(line, depth, 0)
    while place_0 >= 0:
        place_1 = place_of(line, depth, 2 * pair + 1)
        rank_mask = pair_mask(place_1)
        offsets = pair_offsets(arena, place_0, place_1, out_features) + _RANK_ROWS * IN_FEATURES
        b = tl.load(
            arena + offsets[:, None] + out_columns[None, :],
            mask=rank_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        h_mask = row_mask[:, None] & rank_mask[None, :]
        first = column + pair * _PAIR_ROWS
        h = load_planes(planes, num_tokens, rows, first, h_mask, NUM_PLANES, COLUMNS)
        acc = dot(h.to(b.dtype), b, acc, UPCAST)
        pair += 1
        place_0 = place_of(line, depth, 2 * pair)
    return acc


# ---- shrink ----


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["blocks", "pairs", "counts", "tile_tables", "scales", "depths"],
)
def _shrink(
    x,
    planes,
    arena,
    blocks,
    pairs,
    counts,
    tile_tables,
    scales,
    depths,
    num_tokens,
    x_stride,
    line,
    MAX_RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    CHUNKS: tl.constexpr = (IN_FEATURES + _CHUNK - 1) // _CHUNK
    COLUMNS: tl.constexpr = PROJECTIONS * MAX_RANK
    num_items = tl.load(counts + 1) * (PROJECTIONS * CHUNKS)
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in integers of Python.
        chunk = item % CHUNKS
        number = item // CHUNKS % PROJECTIONS
        at = pairs + 2 * (item // (CHUNKS * PROJECTIONS)).to(tl.int64)
        block = blocks + 3 * tl.load(at).to(tl.int64)
        pair = tl.load(at + 1)
        slot = tl.load(block + 2).to(tl.int64)
        tiles, depth = tile_line(tile_tables, depths, slot, line + number)
        place_0 = place_of(tiles, depth, 2 * pair)
        if place_0 >= 0:
            place_1 = place_of(tiles, depth, 2 * pair + 1)
            rank_mask = pair_mask(place_1)
            row = tl.arange(0, BLOCK_ROWS)
            rows = tl.load(block).to(tl.int64) + row
            row_mask = row < tl.load(block + 1)
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
                h = dot(left, right, h, UPCAST)
            scale = tl.load(scales + slot).to(tl.pointer_type(tl.float32)) + line + number
            column = number * MAX_RANK + pair * _PAIR_ROWS + tl.arange(0, _PAIR_ROWS)
            plane = planes + chunk.to(tl.int64) * num_tokens * COLUMNS
            tl.store(
                plane + rows[:, None] * COLUMNS + column[None, :],
                h * tl.load(scale),
                mask=row_mask[:, None] & rank_mask[None, :],
            )


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["blocks", "pairs", "counts", "tile_tables", "depths"],
)
def _sum_planes(
    planes,
    blocks,
    pairs,
    counts,
    tile_tables,
    depths,
    num_tokens,
    line,
    MAX_RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    COLUMNS: tl.constexpr = PROJECTIONS * MAX_RANK
    num_items = tl.load(counts + 1) * PROJECTIONS
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in integers of Python.
        number = item % PROJECTIONS
        at = pairs + 2 * (item // PROJECTIONS).to(tl.int64)
        block = blocks + 3 * tl.load(at).to(tl.int64)
        pair = tl.load(at + 1)
        slot = tl.load(block + 2).to(tl.int64)
        tiles, depth = tile_line(tile_tables, depths, slot, line + number)
        has_tile = place_of(tiles, depth, 2 * pair) >= 0
        row = tl.arange(0, BLOCK_ROWS)
        rows = tl.load(block).to(tl.int64) + row
        row_mask = (row < tl.load(block + 1)) & has_tile
        mask = row_mask[:, None] & pair_mask(place_of(tiles, depth, 2 * pair + 1))[None, :]
        column = number * MAX_RANK + pair * _PAIR_ROWS
        h = load_planes(planes, num_tokens, rows, column, mask, NUM_PLANES, COLUMNS)
        columns = column + tl.arange(0, _PAIR_ROWS)
        tl.store(planes + rows[:, None] * COLUMNS + columns[None, :], h, mask=mask)


def shrink(x: torch.Tensor, work: LoRAWork, site: Site) -> Delta:
    """planes[c, t, s * max_rank + j] = scale * x[t, chunk c] @ A[j, chunk c].

    x: [T, in_features] in the adapters' dtype.   Of large blocks the planes are summed here, in
    the same order: every tile of an expand would do it again, over many tokens.
    Persistent over (pair of tiles, projection, chunk), each written once. Bound by bytes: A's, once
    for every block of tokens. Meaning: `kernels.reference`.
    """
    assert x.dtype == work.arena.dtype
    columns = len(site.projections) * work.max_rank
    planes = x.new_empty((site.num_chunks, len(x), columns), dtype=torch.float32)
    block_k, num_warps, num_stages = _SHRINK[work.block_rows]
    grid = (launch.num_programs(x.device, _SHRINK_PROGRAMS),)
    _shrink[grid](
        x,
        planes,
        work.arena,
        work.blocks,
        work.pairs,
        work.counts,
        work.tile_tables,
        work.scales,
        work.depths,
        len(x),
        x.stride(0),
        first_line(site),
        MAX_RANK=work.max_rank,
        PROJECTIONS=len(site.projections),
        IN_FEATURES=site.in_features,
        BLOCK_ROWS=work.block_rows,
        BLOCK_K=block_k,
        UPCAST=launch.INTERPRETED,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if work.block_rows <= _ROWS_OF_SMALL_BLOCK or site.num_chunks == 1:
        return Delta(planes, work, site)
    _sum_planes[grid](
        planes,
        work.blocks,
        work.pairs,
        work.counts,
        work.tile_tables,
        work.depths,
        len(x),
        first_line(site),
        MAX_RANK=work.max_rank,
        PROJECTIONS=len(site.projections),
        NUM_PLANES=site.num_chunks,
        BLOCK_ROWS=work.block_rows,
        num_warps=4,
    )
    return Delta(planes[:1], work, site)


def num_fused_programs(device: torch.device, block_rows: int) -> int:
    """Of a kernel that expands on the way, as many as registers hold at once: see the configs."""
    if block_rows > _ROWS_OF_SMALL_BLOCK:
        return launch.num_programs(device, 3)
    return launch.num_programs(device, 4 if launch.capability(device) < 90 else 5)


def first_line(site: Site) -> int:
    """Of the site's in a tile table, or in the scales."""
    return site.layer * site.num_projections + site.projections[0]


# ---- expand ----


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["blocks", "counts", "tile_tables", "depths"],
)
def _expand(
    y,
    planes,
    arena,
    blocks,
    counts,
    tile_tables,
    depths,
    num_tokens,
    y_stride,
    line,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # A projection's last tile of columns may be partly empty: none reaches into the next one.
    TILES_0: tl.constexpr = (OUT_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (OUT_1 + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = TILES_0 + TILES_1 + (OUT_2 + BLOCK_N - 1) // BLOCK_N
    num_items = tl.load(counts) * (BLOCK_ROWS // ROWS) * TILES
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in integers of Python.
        first, count, slot = rows_of(blocks, item // TILES, BLOCK_ROWS, ROWS)
        if slot >= 0:
            tile = item % TILES
            number = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_0 + TILES_1).to(tl.int32)
            begin = by_number(number, 0, OUT_0, OUT_0 + OUT_1)
            width = by_number(number, OUT_0, OUT_1, OUT_2)
            tile -= by_number(number, 0, TILES_0, TILES_0 + TILES_1)
            row = tl.arange(0, ROWS)
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (row < count)[:, None] & (columns < width)[None, :]
            at = y + (first + row)[:, None] * y_stride + (begin + columns)[None, :]
            base = tl.load(at, mask=mask, other=0.0)
            tiles, depth = tile_line(tile_tables, depths, slot, line + number)
            delta = add_expanded(
                tl.zeros((ROWS, BLOCK_N), tl.float32),
                arena,
                tiles,
                depth,
                planes,
                num_tokens,
                first + row,
                row < count,
                number * MAX_RANK,
                columns,
                width,
                IN_FEATURES,
                NUM_PLANES,
                COLUMNS,
                UPCAST,
            )
            total = base.to(tl.float32) + delta
            tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def expand(y: torch.Tensor, delta: Delta) -> None:
    """y[t] += (sum over c of planes[c, t]) @ B in place, where t has an adapter.

    y: [T, sum of out_features], of at most three projections.
    Persistent over (block of tokens, tile of columns). Bound by bytes: y's, twice, and B's, once
    for every block of tokens. Meaning: `kernels.reference`.
    """
    work, site = delta.work, delta.site
    out_0, out_1, out_2 = (*site.out_features, 0, 0)[:3]
    _expand[(launch.num_programs(y.device, _EXPAND_PROGRAMS[work.block_rows]),)](
        y,
        delta.planes,
        work.arena,
        work.blocks,
        work.counts,
        work.tile_tables,
        work.depths,
        len(y),
        y.stride(0),
        first_line(site),
        OUT_0=out_0,
        OUT_1=out_1,
        OUT_2=out_2,
        MAX_RANK=work.max_rank,
        COLUMNS=delta.planes.shape[2],
        IN_FEATURES=site.in_features,
        NUM_PLANES=delta.planes.shape[0],
        BLOCK_ROWS=work.block_rows,
        ROWS=min(work.block_rows, TILE_ROWS),
        BLOCK_N=_EXPAND_COLUMNS,
        UPCAST=launch.INTERPRETED,
        num_warps=_EXPAND_WARPS,
    )
