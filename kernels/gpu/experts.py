"""Mixtures of experts: the router, and one product for all experts of a step. Reference:
`kernels.reference`.

Everything that depends on the tokens' choice lies in memory: the product has a program for every
tile that any choice may need, and those without pairs end at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.expansion import dot
from kernels.gpu.quantized import product_of_blocks, words_of
from kernels.packed import STEP, block_size
from kernels.routing import Routing, most_tiles
from kernels.stacked import ExpertStack

_ROUTED = 16
"""Tokens of a program of the router. There is no other number, so that a token's bits depend on the
token only.
"""
_ROUTER_STEP = tl.constexpr(64)
_LISTED = tl.constexpr(16)
"""Tiles, or blocks of counts, that a program looks at at once."""
_SUM_TILE = 1024


class _Tiles(NamedTuple):
    """Tiles of the product: a program multiplies `rows` pairs by `columns` outputs.

    most_pairs: up to which mean number of pairs of an expert they are taken.
    step: inputs that a dense weight is read by.
    """

    rows: int
    most_pairs: float
    columns: int
    step: int
    num_warps: int
    num_stages: int


# None of these has been measured yet. With 128 columns, 64 rows times 4 bits with zeros spill
# registers on sm_86, and 128 rows times packed weights on sm_80.
_DENSE = (
    _Tiles(rows=16, most_pairs=16, columns=64, step=128, num_warps=4, num_stages=4),
    _Tiles(rows=64, most_pairs=256, columns=128, step=64, num_warps=4, num_stages=4),
    _Tiles(rows=128, most_pairs=float("inf"), columns=128, step=64, num_warps=8, num_stages=3),
)
_PACKED = (
    _Tiles(rows=16, most_pairs=16, columns=128, step=STEP, num_warps=4, num_stages=4),
    _Tiles(rows=64, most_pairs=256, columns=64, step=STEP, num_warps=4, num_stages=3),
    _Tiles(rows=128, most_pairs=float("inf"), columns=64, step=STEP, num_warps=4, num_stages=3),
)


# ---- the router ----


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(
    chosen,
    weights,
    counts,
    x,
    router,
    num_tokens,
    x_stride,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Choose the experts of ROWS tokens, and count the tokens of each expert."""
    LOWEST: tl.constexpr = -3.0e38
    block = tl.program_id(0)
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_tokens
    experts = tl.arange(0, COLUMNS)
    is_expert = (experts < EXPERTS)[None, :]
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, HIDDEN, _ROUTER_STEP):
        k = start + tl.arange(0, _ROUTER_STEP)
        left = tl.load(
            x + rows[:, None] * x_stride + k[None, :],
            mask=row_mask[:, None] & (k < HIDDEN)[None, :],
            other=0.0,
        )
        right = tl.load(
            router + experts[None, :] * HIDDEN + k[:, None],
            mask=is_expert & (k < HIDDEN)[:, None],
            other=0.0,
        )
        logits = dot(left, right, logits)
    # NaN and -infinity are the lowest number here, so that any row has experts.
    score = tl.where(logits > LOWEST, logits, LOWEST)
    score = tl.where(is_expert, score, float("-inf"))
    largest = tl.max(score, 1)
    total = tl.sum(tl.where(is_expert, tl.exp(logits - largest[:, None]), 0.0), 1)
    slots = tl.arange(0, SLOTS)[None, :]
    own = tl.zeros((ROWS, SLOTS), tl.float32)
    taken = tl.zeros((ROWS, COLUMNS), tl.int32)
    for slot in tl.static_range(PER_TOKEN):
        best, expert = tl.max(score, 1, return_indices=True)
        own = tl.where(slots == slot, (tl.exp(best - largest) / total)[:, None], own)
        is_taken = experts[None, :] == expert[:, None]
        score = tl.where(is_taken, float("-inf"), score)
        taken += is_taken.to(tl.int32)
        tl.store(chosen + rows * PER_TOKEN + slot, expert, mask=row_mask)
    if NORMS:
        own = own / tl.sum(own, 1)[:, None]
    at = rows[:, None] * PER_TOKEN + slots
    tl.store(weights + at, own, mask=row_mask[:, None] & (slots < PER_TOKEN))
    own_counts = tl.sum(tl.where(row_mask[:, None], taken, 0), 0)
    tl.store(counts + block * COLUMNS + experts, own_counts)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _group(
    pairs,
    tiles,
    chosen,
    counts,
    num_tokens,
    num_tiles,
    COLUMNS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Put the pairs of ROWS tokens to their places, and write some of the tiles."""
    own, num_blocks = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    before = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, num_blocks, _LISTED):
        blocks = tl.cast(first, tl.int32) + tl.arange(0, _LISTED)
        at = counts + blocks[:, None] * COLUMNS + experts[None, :]
        listed = tl.load(at, mask=(blocks < num_blocks)[:, None], other=0)
        total += tl.sum(listed, 0)
        before += tl.sum(tl.where((blocks < own)[:, None], listed, 0), 0)
    starts = tl.cumsum(total, 0) - total
    rows = own * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_tokens
    taken = tl.zeros((ROWS, COLUMNS), tl.int32)
    for slot in tl.static_range(PER_TOKEN):
        expert = tl.load(chosen + rows * PER_TOKEN + slot, mask=row_mask, other=-1)
        taken += (expert[:, None] == experts[None, :]).to(tl.int32)
    places = (starts + before)[None, :] + tl.cumsum(taken, 0) - taken
    for slot in tl.static_range(PER_TOKEN):
        pair = rows * PER_TOKEN + slot
        expert = tl.load(chosen + pair, mask=row_mask, other=-1)
        place = tl.sum(tl.where(expert[:, None] == experts[None, :], places, 0), 1)
        tl.store(pairs + place, pair, mask=row_mask)
    num_own = (total + TILE_ROWS - 1) // TILE_ROWS
    ends = tl.cumsum(num_own, 0)
    for first in range(own * _LISTED, num_tiles, num_blocks * _LISTED):
        tile = tl.cast(first, tl.int32) + tl.arange(0, _LISTED)
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_own = owner[:, None] == experts[None, :]
        skipped = (tile - tl.sum(tl.where(is_own, (ends - num_own)[None, :], 0), 1)) * TILE_ROWS
        # A tile past the last one is no expert's, so nothing is left for it.
        left = tl.sum(tl.where(is_own, total[None, :], 0), 1) - skipped
        start = tl.sum(tl.where(is_own, starts[None, :], 0), 1) + skipped
        mask = tile < num_tiles
        tl.store(tiles + tile, owner, mask=mask)
        tl.store(tiles + num_tiles + tile, start, mask=mask)
        count = tl.minimum(tl.maximum(left, 0), TILE_ROWS)
        tl.store(tiles + 2 * num_tiles + tile, count, mask=mask)


def route(x: torch.Tensor, router: torch.Tensor, per_token: int, norms_weights: bool) -> Routing:
    """Choose each token's experts, and order the tokens by experts.

    x: [T, hidden], rows contiguous.   router: [experts, hidden].
    Grid of both kernels: a program per 16 tokens. The first one is bound by latency at few tokens,
    by the router's bytes from the L2 cache at many. The second one reads how many tokens of each
    16 have which expert, and so knows the place of each pair.   Reference: `kernels.reference`.
    """
    assert x.stride(1) == 1
    assert router.is_contiguous()
    (tokens, hidden), experts = x.shape, len(router)
    num_pairs, columns = tokens * per_token, max(16, triton.next_power_of_2(experts))
    tile_rows = next(own.rows for own in _DENSE if num_pairs <= own.most_pairs * experts)
    grid = (triton.cdiv(tokens, _ROUTED),)
    chosen = x.new_empty((tokens, per_token), dtype=torch.int32)
    weights = x.new_empty((tokens, per_token), dtype=torch.float32)
    counts = x.new_empty((*grid, columns), dtype=torch.int32)
    _choose[grid](
        chosen, weights, counts, x, router, tokens, x.stride(0),
        HIDDEN=hidden, EXPERTS=experts, COLUMNS=columns, PER_TOKEN=per_token,
        SLOTS=triton.next_power_of_2(per_token), NORMS=norms_weights, ROWS=_ROUTED,
        num_stages=4 if columns <= 128 else 2,
    )  # fmt: skip
    pairs = x.new_empty(num_pairs, dtype=torch.int32)
    tiles = x.new_empty((3, most_tiles(num_pairs, experts, tile_rows)), dtype=torch.int32)
    _group[grid](
        pairs, tiles, chosen, counts, tokens, tiles.shape[1],
        COLUMNS=columns, PER_TOKEN=per_token, ROWS=_ROUTED, TILE_ROWS=tile_rows,
    )  # fmt: skip
    return Routing(weights, pairs, tiles, tile_rows)


# ---- products ----


@triton.jit
def _product(
    x_rows,
    row_mask,
    weight,
    columns,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """x @ weight[columns].T, [ROWS, TILE] float32.   weight: [OUT, IN], cast to x's dtype."""
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, IN, STEP):
        k = start + tl.arange(0, STEP)
        left_mask, right_mask = row_mask[:, None], (columns < OUT)[None, :]
        if IN % STEP != 0:
            left_mask &= (k < IN)[None, :]
            right_mask &= (k < IN)[:, None]
        left = tl.load(x_rows[:, None] + k[None, :], mask=left_mask, other=0.0)
        at = weight + columns[None, :] * IN + k[:, None]
        right = tl.load(at, mask=right_mask, other=0.0)
        total = dot(left, right.to(left.dtype), total)
    return total


@triton.jit
def _multiply_tile(
    y,
    x,
    pairs,
    tiles,
    codes,
    scales,
    zeros,
    x_stride,
    PER_TOKEN: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    BITS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    count = tl.load(tiles + 2 * num_tiles + tile)
    if count == 0:
        return
    expert = tl.load(tiles + tile).to(tl.int64)
    row = tl.arange(0, ROWS)
    row_mask = row < count
    places = (tl.load(tiles + num_tiles + tile) + row).to(tl.int64)
    own = tl.load(pairs + places, mask=row_mask, other=0).to(tl.int64)
    source, target = own // PER_TOKEN, places
    if IS_GROUPED:
        source, target = places, own
    x_rows = x + source * x_stride
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column_mask = columns < OUT
    if scales is not None:
        scales += expert * SCALES
    if zeros is not None:
        zeros += expert * ZEROS
    codes += expert * CODES
    if BITS == 0:
        total = _product(x_rows, row_mask, codes, columns, IN, OUT, ROWS, TILE, STEP)
        if scales is not None:
            total *= tl.load(scales + columns, mask=column_mask, other=0.0)[None, :]
    else:
        total = product_of_blocks(
            x_rows, row_mask, codes, scales, zeros, 0, NUM_BLOCKS, columns,
            BITS, IN, NUM_COLUMNS, STEP, GROUP, ROWS, TILE,
        )  # fmt: skip
    at = y + target[:, None] * OUT + columns[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def multiply_experts(
    x: torch.Tensor, weight: ExpertStack, routing: Routing, is_grouped: bool = False
) -> torch.Tensor:
    """x @ weight.T with the weight of each pair's expert, [pairs, out] in x's dtype.

    x, is_grouped: see `kernels.reference`; rows contiguous. Weights with a scale for all inputs are
    multiplied as codes, which are exact, and their sum is scaled.
    Grid: (tiles of pairs, tiles of outputs). The tiles of an expert come one after the other, so
    that programs that run together read the same weights. A row is summed in one order, and its
    bits depend on the tiles' rows only, which follow from the number of tokens.   Few tokens: bound
    by bytes, those of the chosen experts, once.   Many tokens: bound by arithmetic.
    """
    assert x.stride(1) == 1
    assert x.shape[1] == weight.in_features
    rounding, scales, zeros = weight.rounding, words_of(weight.scales), words_of(weight.zeros)
    tiles = next(
        own for own in (_DENSE if rounding is None else _PACKED) if routing.tile_rows <= own.rows
    )
    y = x.new_empty(len(routing.pairs), weight.out_features)
    bits, num_blocks, num_columns, group = 0, 1, weight.out_features, weight.in_features
    if rounding is not None:
        bits, _, num_blocks, _, num_columns = rounding.bits, *weight.codes.shape
        group = rounding.group_size or num_blocks * block_size(bits)
    grid = routing.tiles.shape[1], triton.cdiv(weight.out_features, tiles.columns)
    _multiply_tile[grid](
        y, x, routing.pairs, routing.tiles, weight.codes, scales, zeros, x.stride(0),
        PER_TOKEN=routing.per_token, IS_GROUPED=is_grouped, BITS=bits, IN=weight.in_features,
        OUT=weight.out_features, NUM_COLUMNS=num_columns, NUM_BLOCKS=num_blocks,
        CODES=weight.codes.stride(0), SCALES=0 if scales is None else scales.stride(0),
        ZEROS=0 if zeros is None else zeros.stride(0), GROUP=group, ROWS=routing.tile_rows,
        TILE=tiles.columns, STEP=tiles.step,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return y


# ---- the sum ----


@triton.jit
def _sum_outputs(
    total, outputs, weights, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < HIDDEN
    summed = tl.zeros((TILE,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        output = tl.load(outputs + pair * HIDDEN + columns, mask=mask, other=0.0)
        summed += output.to(tl.float32) * tl.load(weights + pair)
    tl.store(total + token * HIDDEN + columns, summed.to(total.dtype.element_ty), mask=mask)


def sum_experts(outputs: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Sum of each token's outputs by their weights, [T, hidden], in float32 and in order.

    outputs: [pairs, hidden], in the order of tokens, contiguous.
    Grid: a program per (token, 1024 columns).   Bound by bytes: the outputs', once.
    """
    assert outputs.is_contiguous()
    (tokens, per_token), hidden = routing.weights.shape, outputs.shape[1]
    total = outputs.new_empty(tokens, hidden)
    _sum_outputs[(tokens, triton.cdiv(hidden, _SUM_TILE))](
        total, outputs, routing.weights, HIDDEN=hidden, PER_TOKEN=per_token, TILE=_SUM_TILE
    )
    return total
