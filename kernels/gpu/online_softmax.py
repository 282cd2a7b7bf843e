"""The inner loop of attention: an online softmax (Milakov and Gimelshein, arXiv 1805.02867), in
base 2, over tiles of keys of paged KV.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.expansion import dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a program.

    transposed: the accumulator is V^T P^T, whose operands both lie in memory. On sm_90 P V would be
    a WGMMA with its left operand in registers, which ptxas before 13.3 miscompiles (triton issue
    9433).
    """

    rows: int
    keys: int
    warps: int
    stages: int
    transposed: bool = False


def score_factors(head_dim: int, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """(scale, inner) of `fold`: how products of q and k become scores in base 2.

    They are multiplied by `scale`. If they have a bound, tanh(x) comes before that, computed as
    1 - 2 / (2^(inner * x) + 1), and `scale` is the bound.
    """
    factor = (scale or head_dim**-0.5) * math.log2(math.e)
    if softcap is None:
        return factor, 0.0
    return softcap * math.log2(math.e), 2 * factor / softcap


def constants_of(
    q: torch.Tensor, kv: torch.Tensor, tiles: Tiles, window: int | None, softcap: float | None
) -> dict[str, int]:
    """Constants of a kernel that calls `fold`.   q, kv, window, softcap: see its host function."""
    assert kv[0].is_contiguous()
    assert q.stride(2) == 1
    (_, heads, dim), (_, _, kv_heads, block_size, _) = q.shape, kv.shape
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "PAD_DIM": triton.next_power_of_2(dim),
        "BLOCK_SIZE": block_size,
        "WINDOW": window or 0,
        "CAPPED": softcap is not None,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def _load(
    kv,
    blocks,
    slab_stride,
    head,
    keys,
    live,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """K and V at positions `keys` where `live`, [keys, PAD_DIM] each; zeros elsewhere."""
    block = tl.load(blocks + keys // BLOCK_SIZE, mask=live, other=0)
    rows = block.to(tl.int64) * slab_stride + (head * BLOCK_SIZE + keys % BLOCK_SIZE) * DIM
    dims = tl.arange(0, PAD_DIM)
    at = kv + rows[:, None] + dims[None, :]
    mask = live[:, None]
    if DIM < PAD_DIM:
        mask = mask & (dims < DIM)[None, :]
    k = tl.load(at, mask=mask, other=0.0)
    v = tl.load(at + KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
    return k, v


@triton.jit
def fold(
    acc,
    top,
    total,
    q,
    positions,
    kv,
    blocks,
    slab_stride,
    head,
    scale,
    inner,
    first,
    end,
    begin,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHARED_CAST: tl.constexpr,
):
    """(acc, top, total), the state of an online softmax of q's rows, after keys of [first, end).

    positions: those of q's rows.   begin: positions before it are not read.
    scale, inner, CAPPED: see `score_factors`.
    MASKED: some rows do not see some keys. Without it the masks, a third of a tile's instructions,
    are left out.   TRANSPOSED: acc is [dim, rows], a sum of V^T P^T.
    SHARED_CAST: K and V are cast a tile ahead, and handed to the next iteration. If they were cast
    where they are used, each warp would cast all of them, or WGMMA would take them from registers.
    """
    if SHARED_CAST:
        keys = first + tl.arange(0, KEYS)
        live = (keys >= begin) & (keys < end)
        k, v = _load(kv, blocks, slab_stride, head, keys, live, KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        live = tl.full((KEYS,), True, tl.int1)
        if MASKED:
            live = (keys >= begin) & (keys < end)
        if SHARED_CAST:
            ahead = keys + KEYS
            next_k, next_v = _load(
                kv,
                blocks,
                slab_stride,
                head,
                ahead,
                ahead < end,
                KV_HEADS,
                DIM,
                PAD_DIM,
                BLOCK_SIZE,
            )
        else:
            k, v = _load(
                kv, blocks, slab_stride, head, keys, live, KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE
            )
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = dot(q, tl.trans(k), None)
        if CAPPED:
            scores = 1.0 - 2.0 / (tl.math.exp2(scores * inner) + 1.0)
        if MASKED:
            visible = live[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        base = new_top
        if MASKED:
            # A row that has seen no key yet has -inf, and -inf - -inf would be NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores * scale - base[:, None])
        keep = tl.math.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        weights = weights.to(q.dtype)
        if TRANSPOSED:
            acc = dot(tl.trans(v), tl.trans(weights), acc * keep[None, :])
        else:
            acc = dot(weights, v, acc * keep[:, None])
        top = new_top
        if SHARED_CAST:
            k = next_k.to(q.dtype)
            v = next_v.to(q.dtype)
    return acc, top, total
