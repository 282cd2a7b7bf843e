"""Products with weights in 4 or 8 bits and inputs in floating point. Reference:
`kernels.reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.expansion import dot
from kernels.packed import BLOCK, STEP, PackedWeight


class _Tiles(NamedTuple):
    """Tiles for up to `rows` tokens: a program multiplies `rows` tokens by `columns` outputs.

    most_splits: most parts into which the inputs are split. Every part writes float32 sums, and
    the more tokens there are, the more these weigh beside the weights.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    most_splits: int


# None of these has been measured yet. With 128 columns, 32 rows spill registers on sm_100, and 128
# rows spill on sm_80.
_TILES = (
    _Tiles(rows=16, columns=128, num_warps=4, num_stages=6, most_splits=8),
    _Tiles(rows=32, columns=64, num_warps=4, num_stages=5, most_splits=8),
    _Tiles(rows=64, columns=128, num_warps=4, num_stages=4, most_splits=4),
    _Tiles(rows=128, columns=64, num_warps=4, num_stages=3, most_splits=4),
)
_PROGRAMS = 256
"""Number of programs up to which inputs are split: about two for each multiprocessor of an H100.
The number is fixed, so that every GPU sums in the same order.
"""

_SUM_TILE = 1024


@triton.jit
def _add_product(
    total,
    x_rows,
    row_mask,
    codes,
    scales,
    zeros,
    start,
    columns,
    IN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """total + x[:, start : start + 32] @ codes, times their scale unless it is that of all inputs.

    codes: [32, columns].   ZERO: the code of zero where `zeros` is None.
    """
    k = start + tl.arange(0, STEP)
    mask = row_mask[:, None]
    if IN % (2 * STEP) != 0:
        mask &= (k < IN)[None, :]
    left = tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)
    line = start // GROUP * NUM_COLUMNS + columns
    right = codes.to(tl.float32)
    if zeros is not None:
        right -= tl.load(zeros + line)[None, :]
    else:
        right -= ZERO
    if GROUP < IN:
        right *= tl.load(scales + line)[None, :]
    return dot(left, right.to(left.dtype), total, UPCAST)


@triton.jit(do_not_specialize=["num_tokens", "blocks_per_split"])
def _multiply(
    y,
    x,
    codes,
    scales,
    zeros,
    bias,
    num_tokens,
    x_stride,
    blocks_per_split,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    ZERO: tl.constexpr = 8 if BITS == 4 else 0
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    row_mask = rows < num_tokens
    x_rows = x + rows * x_stride
    tile = tl.arange(0, STEP)[:, None] * NUM_COLUMNS + columns[None, :]
    total = tl.zeros((ROWS, TILE), tl.float32)
    first = split * blocks_per_split
    for index in range(first, tl.minimum(first + blocks_per_split, NUM_BLOCKS)):
        block = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        own = codes + block.to(tl.int64) * (2 * STEP * BITS // 8 * NUM_COLUMNS)
        low = tl.load(own + tile)
        if BITS == 4:
            low, high = low & 15, low >> 4
        else:
            high = tl.load(own + STEP * NUM_COLUMNS + tile)
        start = 2 * STEP * block
        total = _add_product(
            total, x_rows, row_mask, low, scales, zeros, start, columns,
            IN, NUM_COLUMNS, STEP, GROUP, ZERO, UPCAST,
        )  # fmt: skip
        total = _add_product(
            total, x_rows, row_mask, high, scales, zeros, start + STEP, columns,
            IN, NUM_COLUMNS, STEP, GROUP, ZERO, UPCAST,
        )  # fmt: skip
    if GROUP >= IN:
        total *= tl.load(scales + columns)[None, :]
    column_mask = columns < OUT
    if bias is not None:
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    at = y + (split.to(tl.int64) * num_tokens + rows[:, None]) * OUT + columns[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_splits(
    y, planes, bias, num_tokens, OUT: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < OUT
    at = planes + token * OUT + columns
    total = tl.load(at, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        at += tl.cast(num_tokens, tl.int64) * OUT
        total += tl.load(at, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * OUT + columns, total.to(y.dtype.element_ty), mask=mask)


def multiply_quantized(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, [T, out] in x's dtype, summed in float32.

    x: [T, in], rows contiguous.   bias: [out].   With groups, weights are rounded to x's dtype.
    With one scale for all inputs, codes are multiplied, which are exact, and their sum is scaled.
    Layout of the codes: see PackedWeight.
    Grid: (tiles of tokens, tiles of outputs, splits of the inputs). Tiles of tokens come first, so
    that programs that run together read the same codes. If there are few tiles, the inputs are
    split to fill the GPU, and `_sum_splits` adds the parts in order; up to 16 tokens a row's bits
    are the same whoever else is there.   Few tokens: bound by bytes, the weight's, once.   Many
    tokens: bound by arithmetic, and every tile of tokens scales the codes anew.
    """
    assert x.stride(1) == 1
    assert x.shape[1] == weight.in_features
    tokens, out = len(x), weight.out_features
    num_blocks, _, num_columns = weight.codes.shape
    tiles = next((tiles for tiles in _TILES if tokens <= tiles.rows), _TILES[-1])
    grid = triton.cdiv(tokens, tiles.rows), num_columns // tiles.columns
    splits = _num_splits(grid[0] * grid[1], min(tiles.most_splits, num_blocks))
    y = x.new_empty(tokens, out)
    planes = y if splits == 1 else x.new_empty((splits, tokens, out), dtype=torch.float32)
    _multiply[(*grid, splits)](
        planes,
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        bias if splits == 1 else None,
        tokens,
        x.stride(0),
        triton.cdiv(num_blocks, splits),
        BITS=weight.rounding.bits,
        IN=weight.in_features,
        OUT=out,
        NUM_COLUMNS=num_columns,
        NUM_BLOCKS=num_blocks,
        STEP=STEP,
        GROUP=weight.rounding.group_size or num_blocks * BLOCK,
        ROWS=tiles.rows,
        TILE=tiles.columns,
        UPCAST=launch.INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _sum_splits[(tokens, triton.cdiv(out, _SUM_TILE))](
            y, planes, bias, tokens, OUT=out, SPLITS=splits, TILE=_SUM_TILE
        )
    return y


def _num_splits(num_tiles: int, most: int) -> int:
    """Number of parts of the inputs, a power of two, with which programs fill a GPU."""
    splits = 1
    while 2 * splits <= most and 2 * splits * num_tiles <= _PROGRAMS:
        splits *= 2
    return splits
