"""Rotary embedding and the write into paged KV, fused with the steps before them: the LoRA expand
of q, k and v, and the norms of heads. Reference: `kernels.reference`.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.expansion import (
    PLANE_COLUMNS,
    TILE_ROWS,
    b_start,
    by_number,
    dot,
    first_line,
    load_b,
    load_planes,
    look_up,
    pair_mask,
    places_of,
)
from kernels.work import PAIR_ROWS, Delta, HeadNorms

_PAIR_ROWS = tl.constexpr(PAIR_ROWS)
_FP8_MAX = tl.constexpr(448.0)

_PLAIN_ROWS = 16
_WARPS = 4


@triton.jit
def _rounded(x, like):
    """x rounded to the dtype of the tensor at `like`, as float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _look_up(
    blocks,
    item,
    num_items,
    line,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`look_up` of an item's tile of rows and projection."""
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    kind = _kind(item % HEADS, Q_HEADS, KV_HEADS)
    return look_up(blocks, item // HEADS, item < num_items, line + kind, BLOCK_ROWS, ROWS)


@triton.jit
def _kind(head, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """0 for a head of q, 1 of k, 2 of v."""
    return (head >= Q_HEADS).to(tl.int32) + (head >= Q_HEADS + KV_HEADS).to(tl.int32)


@triton.jit
def _load_pair(
    arena,
    place_0,
    place_1,
    planes,
    num_tokens,
    rows,
    row_mask,
    column,
    out_columns,
    half_mask,
    gap,
    out_features,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(sum of planes, rows of B for a head's low half, for its high half) of two tiles."""
    low = load_b(arena, place_0, place_1, out_columns, half_mask, out_features, B_START)
    high = load_b(arena, place_0, place_1, out_columns + gap, half_mask, out_features, B_START)
    h_mask = row_mask[:, None] & pair_mask(place_0, place_1)[None, :]
    h = load_planes(planes, num_tokens, rows, column, h_mask, NUM_PLANES, COLUMNS)
    return h.to(low.dtype), low, high


@triton.jit
def _add_other_pairs(
    low,
    high,
    arena,
    line,
    depth,
    planes,
    num_tokens,
    rows,
    row_mask,
    column,
    out_columns,
    half_mask,
    gap,
    out_features,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`add_other_pairs` for a head's halves, with planes read once."""
    pair = 1
    place_0, place_1 = places_of(line, depth, pair)
    while place_0 >= 0:
        h, b_low, b_high = _load_pair(
            arena, place_0, place_1, planes, num_tokens, rows, row_mask,
            column + pair * _PAIR_ROWS, out_columns, half_mask, gap, out_features,
            B_START, NUM_PLANES, COLUMNS,
        )  # fmt: skip
        pair += 1
        place_0, place_1 = places_of(line, depth, pair)
        low = dot(h, b_low, low)
        high = dot(h, b_high, high)
    return low, high


@triton.jit
def _normed(low, high, weight, columns, half_mask, gap, eps, like, HALF_DIM: tl.constexpr):
    """RMSNorm of a head's halves, rounded before and after the weight."""
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
    w_low = tl.load(weight + columns, mask=half_mask, other=0.0).to(tl.float32)
    w_high = tl.load(weight + columns + gap, mask=half_mask, other=0.0).to(tl.float32)
    low = _rounded(_rounded(low * scale, weight) * w_low[None, :], like)
    high = _rounded(_rounded(high * scale, weight) * w_high[None, :], like)
    return low, high


@triton.jit
def _rotated(low, high, cos, sin, position, half, mask, like, ROTARY_HALF: tl.constexpr):
    at = position.to(tl.int64)[:, None] * ROTARY_HALF + half[None, :]
    mask = mask & (half < ROTARY_HALF)[None, :]
    c = tl.load(cos + at, mask=mask, other=1.0)
    s = tl.load(sin + at, mask=mask, other=0.0)
    return _rounded(low * c - high * s, like), _rounded(high * c + low * s, like)


@triton.jit
def _store_kv(kv, offsets, x, is_finite, mask, scale):
    x = tl.where(is_finite, x, 0.0)
    if kv.dtype.element_ty.is_fp8():
        x = x / scale
        x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    tl.store(kv + offsets, x.to(kv.dtype.element_ty), mask=mask)


@triton.jit
def _store_head(
    kv,
    finite,
    slots,
    low,
    high,
    rows,
    row_mask,
    columns,
    half_mask,
    gap,
    head_offset,
    slab_stride,
    token_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
):
    """Store a head of k or v in its tokens' slots; set `finite` to 0 for tokens that are not."""
    # Both comparisons are false for NaN.
    low_finite, high_finite = tl.abs(low) < float("inf"), tl.abs(high) < float("inf")
    is_bad = tl.min((low_finite & high_finite).to(tl.int32), axis=1) == 0
    # Several heads of a token may store here: each writes the same 0.
    tl.store(finite + rows, tl.zeros(rows.shape, tl.int32), mask=is_bad & row_mask)
    slot = tl.load(slots + rows, mask=row_mask, other=-1).to(tl.int64)
    offset = slot // BLOCK_SIZE * slab_stride + slot % BLOCK_SIZE * token_stride + head_offset
    offsets = offset[:, None] + columns[None, :]
    mask = (slot >= 0)[:, None] & half_mask[None, :]
    _store_kv(kv, offsets, low, low_finite, mask, scale)
    _store_kv(kv, offsets + gap, high, high_finite, mask, scale)


@triton.jit(
    do_not_specialize=["num_tokens", "line"],
    do_not_specialize_on_alignment=["positions", "slots", "finite", "counts"],
)
def _rope_store_kv(
    qkv,
    kv,
    cos,
    sin,
    positions,
    slots,
    finite,
    q_norm,
    k_norm,
    eps,
    planes,
    arena,
    blocks,
    counts,
    num_tokens,
    line,
    qkv_stride,
    slab_stride,
    kv_stride,
    head_stride,
    token_stride,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    B_START: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    num_tiles = tl.cdiv(num_tokens, ROWS)
    if planes is not None:
        num_tiles = tl.load(counts) * (BLOCK_ROWS // ROWS)
        first, count, depth, tiles, place_0, place_1 = _look_up(
            blocks, tl.program_id(0), num_tiles * HEADS, line, Q_HEADS, KV_HEADS, BLOCK_ROWS, ROWS
        )
    for index in range(tl.program_id(0), num_tiles * HEADS, tl.num_programs(0)):
        item = tl.cast(index, tl.int32)  # The interpreter counts in Python's integers.
        head, tile = item % HEADS, item // HEADS
        if planes is None:
            first, count = tile.to(tl.int64) * ROWS, num_tokens - tile * ROWS
        row = tl.arange(0, ROWS)
        rows, row_mask = first + row, row < count
        half = tl.arange(0, BLOCK_HALF)
        half_mask = half < HALF_DIM
        # A head has two halves, `gap` columns apart, that are rotated with each other. If only a
        # part of the head is rotated, each half ends with a half of the rest.
        if ROTARY_HALF == HALF_DIM:
            columns = half
            gap = HALF_DIM
        else:
            columns = half + tl.where(half < ROTARY_HALF, 0, ROTARY_HALF)
            gap = tl.where(half < ROTARY_HALF, ROTARY_HALF, HALF_DIM - ROTARY_HALF)
        mask = row_mask[:, None] & half_mask[None, :]
        at = qkv + rows[:, None] * qkv_stride + (head * HEAD_DIM + columns)[None, :]
        # These loads are issued before an adapter is looked up.
        low = tl.load(at, mask=mask, other=0.0)
        high = tl.load(at + gap, mask=mask, other=0.0)
        position = tl.load(positions + rows, mask=row_mask, other=0)
        kind = _kind(head, Q_HEADS, KV_HEADS)
        kv_head = (head - by_number(kind, 0, Q_HEADS, Q_HEADS + KV_HEADS)).to(tl.int64)
        if planes is not None:
            out_columns = kv_head * HEAD_DIM + columns
            out_features = tl.where(kind == 0, Q_HEADS, KV_HEADS) * HEAD_DIM
            h, b_low, b_high = _load_pair(
                arena, place_0, place_1, planes, num_tokens, rows, row_mask,
                kind * PLANE_COLUMNS, out_columns, half_mask, gap, out_features,
                B_START, NUM_PLANES, 3 * PLANE_COLUMNS,
            )  # fmt: skip
            own_depth, own_tiles = depth, tiles
            # The next item is looked up while this one's products wait for their operands.
            first, count, depth, tiles, place_0, place_1 = _look_up(
                blocks, item + tl.num_programs(0), num_tiles * HEADS, line,
                Q_HEADS, KV_HEADS, BLOCK_ROWS, ROWS,
            )  # fmt: skip
            zeros = tl.zeros((ROWS, BLOCK_HALF), tl.float32)
            delta_low, delta_high = _add_other_pairs(
                dot(h, b_low, zeros), dot(h, b_high, zeros),
                arena, own_tiles, own_depth, planes, num_tokens, rows, row_mask,
                kind * PLANE_COLUMNS, out_columns, half_mask, gap, out_features,
                B_START, NUM_PLANES, 3 * PLANE_COLUMNS,
            )  # fmt: skip
            low = _rounded(low.to(tl.float32) + delta_low, qkv)
            high = _rounded(high.to(tl.float32) + delta_high, qkv)
        else:
            low, high = low.to(tl.float32), high.to(tl.float32)
        if q_norm is not None:
            if kind == 0:
                low, high = _normed(low, high, q_norm, columns, half_mask, gap, eps, qkv, HALF_DIM)
            elif kind == 1:
                low, high = _normed(low, high, k_norm, columns, half_mask, gap, eps, qkv, HALF_DIM)
        if kind < 2:
            low, high = _rotated(low, high, cos, sin, position, half, mask, qkv, ROTARY_HALF)
        if kind == 0:
            tl.store(at, low.to(qkv.dtype.element_ty), mask=mask)
            tl.store(at + gap, high.to(qkv.dtype.element_ty), mask=mask)
        else:
            _store_head(
                kv,
                finite,
                slots,
                low,
                high,
                rows,
                row_mask,
                columns,
                half_mask,
                gap,
                (kind - 1) * kv_stride + kv_head * head_stride,
                slab_stride,
                token_stride,
                tl.where(kind == 1, k_scale, v_scale),
                BLOCK_SIZE,
            )


def rope_store_kv(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    finite: torch.Tensor,
    norms: HeadNorms | None = None,
    delta: Delta | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Rotate q and k by their positions, in place, and write k and v to their slots of `kv`.

    qkv: [T, (heads + 2 * kv heads) * head_dim].   kv: [slabs, 2, kv heads, block_size, head_dim],
    its last dimension contiguous.   cos, sin: [positions, dim / 2] float32, contiguous; the
    first `dim` features of a head are rotated.
    Persistent over (tile of tokens, head); with `delta` the tiles are those of its blocks. A head
    is loaded as two halves, so that its rotation is elementwise. Bound by bytes: qkv's, q's and the
    written KV's, and B's for every block of tokens. Reference: `kernels.reference`.
    """
    _, _, kv_heads, block_size, dim = kv.shape
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    work = delta.work if delta else None
    launch.persistent(
        _rope_store_kv,
        qkv,
        kv,
        cos,
        sin,
        positions,
        slots,
        finite,
        norms.q if norms else None,
        norms.k if norms else None,
        norms.eps if norms else 0.0,
        delta.planes if delta else None,
        work.arena if work else None,
        work.blocks if work else None,
        work.counts if work else None,
        len(qkv),
        first_line(delta.site) if delta else 0,
        qkv.stride(0),
        *kv.stride()[:4],
        *kv_scales,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        ROTARY_HALF=cos.shape[1],
        BLOCK_SIZE=block_size,
        B_START=b_start(delta.site) if delta else 0,
        NUM_PLANES=delta.planes.shape[0] if delta else 0,
        BLOCK_ROWS=work.block_rows if work else 0,
        ROWS=min(work.block_rows, TILE_ROWS) if work else _PLAIN_ROWS,
        BLOCK_HALF=max(16, triton.next_power_of_2(dim // 2)),
        num_warps=_WARPS,
    )
