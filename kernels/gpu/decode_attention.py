"""Attention of decodes: a row's keys are split, and a second kernel combines its splits.

The query heads of one kv head are rows of the same tile, so that K and V are read once for all of
them, and so are the queries of a row that verifies drafts. Splits and tiles of keys begin at
absolute positions, and a row of a tile does nothing that depends on the others, so that a token's
result depends neither on other rows nor on how many drafts there are.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.online_softmax import Tiles, constants_of, fold, score_factors
from kernels.work import LEAST_DECODE_ROWS, SPLIT_KEYS, AttentionWork, Decode

_INDICES = ["decodes", "blocks", "items", "num_items"]

_DECODE_INTS = tl.constexpr(len(Decode._fields))
_SPLIT = tl.constexpr(SPLIT_KEYS)

_ITEMS = tl.constexpr(16)
"""Splits that the reduction adds at a time."""


def _decode_tiles(
    head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Tiles for a device. With 3 stages one tile of K and V is loaded while another is used; with
    5 stages two are loaded.
    """
    capability, dim = launch.capability(device), triton.next_power_of_2(head_dim)
    rows = max(LEAST_DECODE_ROWS, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tiles(rows, 16, 4, 1)
    has_room = kv_dtype != dtype or capability == 80 or capability // 10 in (9, 10, 11)
    if dim > 128:
        return Tiles(rows, 32, 4, 3)
    if has_room:
        return Tiles(rows, 64, 4, 5)
    return Tiles(rows, 64, 4, 3) if dim > 64 else Tiles(rows, 32, 4, 5)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _decode_kernel(
    partial,
    lse,
    q,
    kv,
    decodes,
    blocks,
    items,
    num_items,
    q_token_stride,
    q_head_stride,
    slab_stride,
    scale,
    inner,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    queries = rows // GROUP
    dims = tl.arange(0, PAD_DIM)
    count = tl.load(num_items) * KV_HEADS
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        item = index // KV_HEADS
        head = index % KV_HEADS
        # See kernels.work.Decode; the record is that of the tile's first query.
        decode = decodes + tl.load(items + 2 * item) * _DECODE_INTS
        split = tl.load(items + 2 * item + 1)
        token = tl.load(decode)
        length = tl.load(decode + 1)
        num_queries = tl.load(decode + 3)
        is_row = queries < num_queries
        mask = is_row[:, None] & (dims < DIM)[None, :]
        heads = (head * GROUP + rows % GROUP).to(tl.int64)
        at = (token + queries).to(tl.int64) * q_token_stride + heads * q_head_stride
        query = tl.load(q + at[:, None] + dims[None, :], mask=mask, other=0.0)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(length - WINDOW, 0)
        # fmt: off
        acc, top, total = fold(
            tl.zeros((ROWS, PAD_DIM), tl.float32),
            tl.full((ROWS,), float("-inf"), tl.float32),
            tl.zeros((ROWS,), tl.float32),
            query, length - 1 + queries,
            kv, blocks + tl.load(decode + 2), slab_stride, head, scale, inner,
            tl.maximum(split * _SPLIT, begin // KEYS * KEYS),
            tl.minimum(split * _SPLIT + _SPLIT, length - 1 + num_queries), begin,
            KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE, KEYS, WINDOW, CAPPED, True, False, False,
        )
        # fmt: on
        # A split that sees no key has no weight: its lse is -inf, its mean 0 and not NaN.
        total = tl.where(total == 0.0, 1.0, total)
        first_sum = tl.load(decode + 5) + (split - tl.load(decode + 4)) * num_queries
        to = (first_sum + queries).to(tl.int64) * KV_HEADS * GROUP + heads
        partials = partial + (to * DIM)[:, None] + dims[None, :]
        tl.store(partials, acc / total[:, None], mask=mask)
        tl.store(lse + to, top + tl.math.log2(total), mask=is_row)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _reduce_kernel(
    out,
    partial,
    lse,
    decodes,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
):
    decode = decodes + tl.program_id(0) * _DECODE_INTS
    head = tl.program_id(1)
    step = tl.load(decode + 3)
    first = tl.load(decode + 5)
    count = tl.load(decode + 6)
    if count == 0:
        return
    dims = tl.arange(0, PAD_DIM)
    top = float("-inf")
    for start in range(0, count, _ITEMS):
        splits = start + tl.arange(0, _ITEMS)
        at = (first + splits * step).to(tl.int64) * HEADS + head
        top = tl.maximum(top, tl.max(tl.load(lse + at, mask=splits < count, other=float("-inf"))))
    total = 0.0
    acc = tl.zeros((PAD_DIM,), tl.float32)
    for start in range(0, count, _ITEMS):
        splits = start + tl.arange(0, _ITEMS)
        at = (first + splits * step).to(tl.int64) * HEADS + head
        weights = tl.math.exp2(tl.load(lse + at, mask=splits < count, other=float("-inf")) - top)
        mask = (splits < count)[:, None] & (dims < DIM)[None, :]
        parts = tl.load(partial + (at * DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
        total += tl.sum(weights)
        acc += tl.sum(weights[:, None] * parts, 0)
    token = tl.load(decode).to(tl.int64)
    to = out + token * token_stride + head.to(tl.int64) * head_stride + dims
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


def decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    work: AttentionWork,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """out[t] = softmax(scale * q[t] K^T) V over the positions up to t's, for the rows that decode;
    see `kernels.reference`.

    out, q: [T, heads, head_dim], strided.   kv: one layer's [slabs, 2, kv heads, block_size,
    head_dim], strided by slab, in q's dtype or e4m3.   scale: None for 1 / sqrt(head_dim).
    softcap: bound c of the scores x, which become c * tanh(x / c).
    Persistent over (item, kv head); a second kernel, with a program per (token, head), combines a
    token's splits. Both are launched for each part of the items; the parts share the memory of the
    partial sums. Bound by the bytes of K and V.
    """
    num_parts, (_, heads, dim) = len(work.num_decode_items), q.shape
    capacity, num_decodes = len(work.decode_items) // num_parts, -(-len(work.decodes) // num_parts)
    if capacity == 0:
        return
    assert out.stride(2) == 1
    tiles = _decode_tiles(dim, heads // kv.shape[2], q.dtype, kv.dtype, q.device)
    constants = constants_of(q, kv, tiles, window, softcap)
    partial = torch.empty(capacity, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(capacity, heads, dtype=torch.float32, device=q.device)
    for part in range(num_parts):
        launch.persistent(
            _decode_kernel,
            partial,
            lse,
            q,
            kv,
            work.decodes,
            work.blocks,
            work.decode_items[part * capacity :],
            work.num_decode_items[part:],
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            *score_factors(dim, scale, softcap),
            **constants,
        )
        decodes = work.decodes[part * num_decodes :][:num_decodes]
        _reduce_kernel[(len(decodes), heads)](
            out,
            partial,
            lse,
            decodes,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            DIM=dim,
            PAD_DIM=triton.next_power_of_2(dim),
            num_warps=4,
        )
