"""Parts of kernels that expand LoRA: they look up tiles of the arena, and multiply planes by B.

All of them are inlined into `kernels.gpu.lora`, `rope` and `activation`.
"""

import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.tiles import ADDRESS_UNIT_BYTES, MAX_RANK, RANK_ROWS
from kernels.work import PAIR_ROWS, Site

TILE_ROWS = 32
"""Most tokens that one program expands for. With 64, `tl.dot` is a WGMMA whose left operand is in
registers, which ptxas before 13.3 miscompiles (triton issue 9433); with 32 it is an `mma.sync`.
"""

ROWS_OF_SMALL_BLOCK = 16

_RANK_ROWS = tl.constexpr(RANK_ROWS)
_PAIR_ROWS = tl.constexpr(PAIR_ROWS)
_UNIT_BITS = tl.constexpr(8 * ADDRESS_UNIT_BYTES)
_UPCAST = tl.constexpr(launch.INTERPRETED)

PLANE_COLUMNS = tl.constexpr(MAX_RANK)
"""Columns of one projection in the planes: no adapter's rank compiles a kernel anew."""


# ---- on the host ----


def first_line(site: Site) -> int:
    """First line of the site in a tile table, and in the scales."""
    return site.layer * site.num_projections + site.projections[0]


def b_start(site: Site) -> int:
    """Offset of the rows of B in a tile, in elements: the rows of A come before them."""
    return RANK_ROWS * site.in_features


# ---- in kernels ----


@triton.jit
def block_of(blocks, index, is_there=True):
    """(first token, tokens, depth, tile table, scales) of a BLOCK, by two loads of 16 bytes; zeros
    if it is not there.
    """
    words = blocks.to(tl.pointer_type(tl.int64), bitcast=True) + 4 * index.to(tl.int64)
    record = tl.load(words + tl.arange(0, 4), mask=is_there, other=0)
    even, odd = tl.split(tl.reshape(record, (2, 2)))
    tokens, table = tl.split(even)
    depth, scales = tl.split(odd)
    first, count = tokens.to(tl.int32).to(tl.int64), (tokens >> 32).to(tl.int32)
    return first, count, depth, table, scales


@triton.jit
def rows_of(blocks, tile, is_there, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """(first token, tokens, depth, tile table) of a tile of ROWS rows of a block of BLOCK_ROWS."""
    TILES: tl.constexpr = BLOCK_ROWS // ROWS
    first, count, depth, table, _ = block_of(blocks, tile // TILES, is_there)
    skipped = tile % TILES * ROWS
    # A tile without tokens has nothing to look up.
    return first + skipped, count - skipped, tl.where(count > skipped, depth, 0), table


@triton.jit
def by_number(number, zeroth, first, second):
    """One of three values, by a projection's number among those of its site."""
    return tl.where(number == 0, zeroth, tl.where(number == 1, first, second))


@triton.jit
def pair_of(pairs, index):
    """(block, pair) of an item of LoRAWork.pairs."""
    return tl.split(tl.load(pairs + 2 * index.to(tl.int64) + tl.arange(0, 2)))


@triton.jit
def tile_line(table, depth, line):
    """Start of a line of `depth` places in a tile table."""
    return table.to(tl.pointer_type(tl.int32)) + tl.cast(line, tl.int64) * depth


@triton.jit
def places_of(line, depth, pair):
    """Places of the tiles 2 * pair and 2 * pair + 1 of a line, -1 past its end."""
    place_0 = tl.load(line + 2 * pair, mask=2 * pair < depth, other=-1)
    return place_0, tl.load(line + 2 * pair + 1, mask=2 * pair + 1 < depth, other=-1)


@triton.jit
def look_up(blocks, tile, is_there, line, BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """(first token, tokens, depth, start of the line, its first two places) of a tile of rows."""
    first, count, depth, table = rows_of(blocks, tile, is_there, BLOCK_ROWS, ROWS)
    tiles = tile_line(table, depth, line)
    place_0, place_1 = places_of(tiles, depth, 0)
    return first, count, depth, tiles, place_0, place_1


@triton.jit
def pair_offsets(arena, place_0, place_1, row_elems):
    """Elements from the arena's start to each row of two tiles, [16] int64."""
    row = tl.arange(0, _PAIR_ROWS)
    place = tl.where(row < _RANK_ROWS, place_0, place_1).to(tl.int64)
    unit: tl.constexpr = _UNIT_BITS // arena.dtype.element_ty.primitive_bitwidth
    return place * unit + (row % _RANK_ROWS) * row_elems


@triton.jit
def pair_mask(place_0, place_1):
    """Mask of the rows of a pair that exist, [16]: a tile may be missing."""
    return tl.where(tl.arange(0, _PAIR_ROWS) < _RANK_ROWS, place_0, place_1) >= 0


@triton.jit
def load_b(arena, place_0, place_1, columns, column_mask, out_features, B_START: tl.constexpr):
    """Rows of B of two tiles, [16, columns]; zeros where a tile is missing, or a column is masked.

    B_START: see `b_start`.
    """
    at = arena + pair_offsets(arena, place_0, place_1, out_features)[:, None] + B_START
    mask = pair_mask(place_0, place_1)[:, None] & column_mask[None, :]
    return tl.load(at + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_planes(
    planes, num_tokens, rows, column, mask, NUM_PLANES: tl.constexpr, COLUMNS: tl.constexpr
):
    """16 columns from `column` on, summed over the planes in order, [rows, 16] float32."""
    columns = column + tl.arange(0, _PAIR_ROWS)
    at = planes + rows[:, None] * COLUMNS + columns[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    # The compiler unrolls this loop. In one that Triton unrolls, each plane would be moved through
    # shared memory into the layout of the dot's operand, and only then the next one loaded.
    for _ in range(1, NUM_PLANES):
        at += tl.cast(num_tokens, tl.int64) * COLUMNS
        h += tl.load(at, mask=mask, other=0.0)
    return h


@triton.jit
def dot(left, right, acc):
    """acc + left @ right. In Triton's interpreter bfloat16 is an integer, so it is cast."""
    if _UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def load_pair(
    arena,
    place_0,
    place_1,
    planes,
    num_tokens,
    rows,
    row_mask,
    column,
    out_columns,
    out_features,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(sum of planes, rows of B) of two tiles, [rows, 16] and [16, out_columns], in B's dtype.

    column: the pair's first column in the planes.   B_START: see `b_start`.
    """
    column_mask = out_columns < out_features
    b = load_b(arena, place_0, place_1, out_columns, column_mask, out_features, B_START)
    mask = row_mask[:, None] & pair_mask(place_0, place_1)[None, :]
    h = load_planes(planes, num_tokens, rows, column, mask, NUM_PLANES, COLUMNS)
    return h.to(b.dtype), b


@triton.jit
def add_other_pairs(
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
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """acc + (sum of planes) @ B of the line's tiles after the first two.

    acc: [rows, out_columns] float32.   column: the projection's first column in the planes.
    """
    pair = 1
    place_0, place_1 = places_of(line, depth, pair)
    while place_0 >= 0:
        h, b = load_pair(
            arena, place_0, place_1, planes, num_tokens, rows, row_mask,
            column + pair * _PAIR_ROWS, out_columns, out_features, B_START, NUM_PLANES, COLUMNS,
        )  # fmt: skip
        pair += 1
        # The next places are loaded while the product still waits for its operands.
        place_0, place_1 = places_of(line, depth, pair)
        acc = dot(h, b, acc)
    return acc
