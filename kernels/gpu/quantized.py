"""Products with weights in 4 or 8 bits and inputs in floating point. Reference:
`kernels.reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.expansion import dot
from kernels.packed import COLUMNS, STEP, PackedWeight, block_size


class _Tiles(NamedTuple):
    """Tiles for up to `rows` tokens: a program multiplies `rows` tokens by `columns` outputs.

    most_splits: most parts into which the inputs are split. Every part writes float32 sums, and
    the more tokens there are, the more these weigh beside the weights.
    most_registers: of a thread. Left to itself, ptxas spills some on sm_120 to get along with 96.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    most_splits: int
    most_registers: int | None = None


# None of these has been measured yet. With 128 columns, 32 rows spill registers on sm_100, and 128
# rows spill on sm_80.
_TILES = (
    _Tiles(rows=16, columns=128, num_warps=4, num_stages=4, most_splits=8, most_registers=128),
    _Tiles(rows=32, columns=64, num_warps=4, num_stages=3, most_splits=8),
    _Tiles(rows=64, columns=128, num_warps=4, num_stages=3, most_splits=4),
    _Tiles(rows=128, columns=64, num_warps=8, num_stages=3, most_splits=4),
)
_PROGRAMS = 256
"""Number of programs up to which inputs are split: about two for each multiprocessor of an H100.
The number is fixed, so that every GPU sums in the same order.
"""

_SUM_TILE = 1024
_MOST_SCALED = 256
"""Most tokens whose tiles scale the weights themselves. On an H100, by counted instructions, a tile
of 128 tokens spends 2.5 ms on scaling the 7e9 weights in an 8B's layers. Writing them in 16 bits
and reading them again is 28 GB, so 9 ms at most, for any number of tokens.
"""
_SCRATCH_BYTES = 64 << 20
"""Most memory of weights that are written in 16 bits. With half of it, products of 2,048 tokens
with `down` of an 8B would have fewer tiles of 128 x 256 than an H100 has multiprocessors.
"""


@triton.jit
def _of_group(values, group, columns, NUM_COLUMNS: tl.constexpr):
    """Scales or zeros of a group, float32.   values: see PackedWeight; float16 as int32 words."""
    if values.dtype.element_ty == tl.float32:
        found = tl.load(values + group * NUM_COLUMNS + columns)
    else:
        words = tl.load(values + group // 2 * NUM_COLUMNS + columns)
        found = (words >> 16 * (group % 2)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _load_words(codes, block, columns, NUM_COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """The codes of a block of inputs, [32, columns] words."""
    tile = tl.arange(0, STEP)[:, None] * NUM_COLUMNS + columns[None, :]
    return tl.load(codes + block.to(tl.int64) * (STEP * NUM_COLUMNS) + tile)


@triton.jit
def _numbers(
    words,
    scales,
    zeros,
    start,
    columns,
    FIELD: tl.constexpr,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Weights of the 32 inputs from `start` on, float32, whose codes are field FIELD of the words;
    without a scale that all inputs share.
    """
    # A code stays where it is and becomes the last bits of a float, with the exponent for which bit
    # AT counts 1: that float is BASE + code, exactly. So a code needs no shift and no conversion.
    AT: tl.constexpr = BITS * FIELD
    BASE: tl.constexpr = 2.0 ** (23 - AT)
    code = words.to(tl.int32) & (((1 << BITS) - 1) << AT)
    raised = (code | ((150 - AT) << 23)).to(tl.float32, bitcast=True)
    group = start // GROUP
    if zeros is not None:
        numbers = raised - (BASE + _of_group(zeros, group, columns, NUM_COLUMNS))[None, :]
    else:
        numbers = raised - (BASE + 2 ** (BITS - 1))
    if GROUP < IN:
        numbers *= _of_group(scales, group, columns, NUM_COLUMNS)[None, :]
    return numbers


@triton.jit
def _add_block(
    total,
    x_rows,
    row_mask,
    codes,
    scales,
    zeros,
    block,
    columns,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """total + x[:, the block's inputs] @ their weights, without a scale that all inputs share."""
    FIELDS: tl.constexpr = 16 // BITS
    words = _load_words(codes, block, columns, NUM_COLUMNS, STEP)
    for field in tl.static_range(FIELDS):
        start = (block * FIELDS + field) * STEP
        k = start + tl.arange(0, STEP)
        mask = row_mask[:, None]
        if IN % (FIELDS * STEP) != 0:
            mask &= (k < IN)[None, :]
        left = tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)
        right = _numbers(words, scales, zeros, start, columns, field, BITS, IN, NUM_COLUMNS, GROUP)
        total = dot(left, right.to(left.dtype), total)
    return total


@triton.jit
def product_of_blocks(
    x_rows,
    row_mask,
    codes,
    scales,
    zeros,
    first,
    end,
    columns,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """x @ weights of the inputs of blocks `first` to `end` - 1, [ROWS, TILE] float32.

    x_rows: addresses of the rows.   codes, scales, zeros: see PackedWeight.
    """
    total = tl.zeros((ROWS, TILE), tl.float32)
    for index in range(first, end):
        block = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        total = _add_block(
            total, x_rows, row_mask, codes, scales, zeros, block, columns,
            BITS, IN, NUM_COLUMNS, STEP, GROUP,
        )  # fmt: skip
    if GROUP >= IN:
        total *= _of_group(scales, 0, columns, NUM_COLUMNS)[None, :]
    return total


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
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    row_mask = rows < num_tokens
    first = split * blocks_per_split
    total = product_of_blocks(
        x + rows * x_stride, row_mask, codes, scales, zeros,
        first, tl.minimum(first + blocks_per_split, NUM_BLOCKS), columns,
        BITS, IN, NUM_COLUMNS, STEP, GROUP, ROWS, TILE,
    )  # fmt: skip
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


@triton.jit
def _dequantize(
    dense,
    codes,
    scales,
    zeros,
    first_column,
    width,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """dense[i, c] = the weight of input i and output first_column + c.   dense: [in, width].

    first_column, width: multiples of 128, which Triton has to know to load and store 16 bytes.
    """
    block = tl.program_id(0)
    own = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = first_column + own
    words = _load_words(codes, block, columns, NUM_COLUMNS, STEP)
    FIELDS: tl.constexpr = 16 // BITS
    for field in tl.static_range(FIELDS):
        start = (block * FIELDS + field) * STEP
        numbers = _numbers(
            words, scales, zeros, start, columns, field, BITS, IN, NUM_COLUMNS, GROUP
        )
        if GROUP >= IN:
            numbers *= _of_group(scales, 0, columns, NUM_COLUMNS)[None, :]
        k = start + tl.arange(0, STEP)
        at = dense + k.to(tl.int64)[:, None] * width + own[None, :]
        tl.store(at, numbers.to(dense.dtype.element_ty), mask=(k < IN)[:, None])


def multiply_quantized(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, [T, out] in x's dtype, summed in float32.

    x: [T, in], rows contiguous.   bias: [out].   With groups, weights are rounded to x's dtype.
    With one scale for all inputs, up to 256 tokens are multiplied by codes, which are exact, and
    their sum is scaled. Layout of the codes: see PackedWeight.
    More than 256 tokens are multiplied by torch with weights that `_dequantize` writes, which are
    those of `kernels.reference`, rounded to x's dtype.
    """
    assert x.stride(1) == 1
    assert x.shape[1] == weight.in_features
    multiply = _multiply_dense if len(x) > _MOST_SCALED else _multiply_tiles
    return multiply(x, weight, bias)


def _multiply_tiles(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by weights that every tile of tokens scales for itself.

    Grid: (tiles of tokens, tiles of outputs, splits of the inputs). Tiles of tokens come first, so
    that programs that run together read the same codes. If there are few tiles, the inputs are
    split to fill the GPU, and `_sum_splits` adds the parts in order; up to 16 tokens a row's bits
    are the same whoever else is there.   Bound by bytes, the weight's, once.
    """
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
        *_operands(weight),
        bias if splits == 1 else None,
        tokens,
        x.stride(0),
        triton.cdiv(num_blocks, splits),
        **_constants(weight),
        OUT=out,
        NUM_BLOCKS=num_blocks,
        ROWS=tiles.rows,
        TILE=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.most_registers,
    )
    if splits > 1:
        _sum_splits[(tokens, triton.cdiv(out, _SUM_TILE))](
            y, planes, bias, tokens, OUT=out, SPLITS=splits, TILE=_SUM_TILE
        )
    return y


def _multiply_dense(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply by weights that are written in x's dtype, some outputs after the others.

    Grid: (blocks of inputs, tiles of outputs).   Bound by arithmetic, but for 4 bytes a weight.
    """
    tokens, out, size = len(x), weight.out_features, weight.in_features * x.element_size()
    num_blocks, _, num_columns = weight.codes.shape
    num_tiles, most_tiles = num_columns // COLUMNS, max(1, _SCRATCH_BYTES // (size * COLUMNS))
    width = triton.cdiv(num_tiles, triton.cdiv(num_tiles, most_tiles)) * COLUMNS
    dense, y = x.new_empty(weight.in_features, width), x.new_empty(tokens, out)
    for first in range(0, out, width):
        _dequantize[(num_blocks, min(width, num_columns - first) // COLUMNS)](
            dense, *_operands(weight), first, width, **_constants(weight), TILE=COLUMNS
        )
        part = slice(first, min(out, first + width))
        right = dense[:, : part.stop - first]
        if bias is None:
            torch.mm(x, right, out=y[:, part])
        else:
            torch.addmm(bias[part], x, right, out=y[:, part])
    return y


def _operands(weight: PackedWeight) -> tuple[torch.Tensor | None, ...]:
    return weight.codes, words_of(weight.scales), words_of(weight.zeros)


def words_of(values: torch.Tensor | None) -> torch.Tensor | None:
    """Scales or zeros as kernels read them: two numbers of 16 bits at a time."""
    if values is None or values.dtype == torch.float32:
        return values
    return values.view(torch.int32)


def _constants(weight: PackedWeight) -> dict[str, int]:
    num_blocks, _, num_columns = weight.codes.shape
    bits = weight.rounding.bits
    return {
        "BITS": bits,
        "IN": weight.in_features,
        "NUM_COLUMNS": num_columns,
        "STEP": STEP,
        "GROUP": weight.rounding.group_size or num_blocks * block_size(bits),
    }


def _num_splits(num_tiles: int, most: int) -> int:
    """Number of parts of the inputs, a power of two, with which programs fill a GPU."""
    splits = 1
    while 2 * splits <= most and 2 * splits * num_tiles <= _PROGRAMS:
        splits *= 2
    return splits
