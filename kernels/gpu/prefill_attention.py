"""Attention of prefills: a program for each tile of a row's queries and each kv head.

The query heads of one kv head are rows of the same tile, so that K and V are read once for all of
them. Tiles of keys begin at absolute positions, so that a row's result does not depend on other
rows.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu import launch
from kernels.gpu.online_softmax import Tiles, constants_of, fold, score_factors
from kernels.work import AttentionWork

_INDICES = ["query_starts", "seq_lens", "block_starts", "blocks", "items", "num_items"]


def prefill_queries(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Queries per tile: the most that `AttentionWork.prefill_queries` may be."""
    tiles = _prefill_tiles(head_dim, dtype, dtype, device)
    return max(1, tiles.rows // (heads // kv_heads))


def _prefill_tiles(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Tiles for a device, chosen by registers, shared memory and instructions of compiled kernels;
    they are not tuned by measured times.
    """
    capability, dim = launch.capability(device), triton.next_power_of_2(head_dim)
    is_cast = kv_dtype != dtype
    if dtype == torch.float32:
        return Tiles(32, 16, 8, 1)
    if capability // 10 == 9:
        if dim > 128:
            return Tiles(128, 16 if is_cast else 32, 8, 3, transposed=True)
        if dim > 64:
            return Tiles(128, 64 if is_cast else 128, 8, 3, transposed=True)
        return Tiles(128, 32 if is_cast else 64, 4, 3, transposed=True)
    if capability // 10 in (10, 11):
        keys = 64 if is_cast and dim <= 64 else 128
        return Tiles(128, 32 if dim > 128 else keys, 8, 3)
    if dim > 128:
        return Tiles(64, 32, 8, 3)
    return Tiles(128, 32, 8, 5) if dim > 64 else Tiles(128, 64, 8, 3)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _prefill_kernel(
    out,
    q,
    kv,
    query_starts,
    seq_lens,
    block_starts,
    blocks,
    items,
    num_items,
    out_token_stride,
    out_head_stride,
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
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    CAST: tl.constexpr = kv.dtype.element_ty != q.dtype.element_ty
    count = tl.load(num_items)
    if tl.program_id(0) >= count:
        return
    # The last tiles start first, because they see the most keys.
    item = count - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(items + 2 * item)
    tile = tl.load(items + 2 * item + 1)
    first_token = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - first_token
    length = tl.load(seq_lens + row)
    blocks += tl.load(block_starts + row)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PAD_DIM)
    queries = tile * QUERIES + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < num_queries)
    positions = length - num_queries + queries
    heads = (head * GROUP + rows % GROUP).to(tl.int64)
    tokens = (first_token + queries).to(tl.int64)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    at = tokens * q_token_stride + heads * q_head_stride
    query = tl.load(q + at[:, None] + dims[None, :], mask=mask, other=0.0)

    # Every query of the tile sees the keys [whole, full); each of [begin, stop) is seen by some.
    lowest = length - num_queries + tile * QUERIES
    stop = tl.minimum(lowest + QUERIES, length)
    full = (lowest + 1) // KEYS * KEYS
    begin = 0
    whole = 0
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if TRANSPOSED:
        acc = tl.zeros((PAD_DIM, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, PAD_DIM), tl.float32)
    # fmt: off
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0)
        whole = tl.minimum(tl.cdiv(tl.maximum(stop - WINDOW, 0), KEYS) * KEYS, full)
        acc, top, total = fold(
            acc, top, total, query, positions, kv, blocks, slab_stride, head, scale, inner,
            begin // KEYS * KEYS, whole, begin,
            KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE, KEYS, WINDOW, CAPPED, True,
            TRANSPOSED, CAST,
        )
    acc, top, total = fold(
        acc, top, total, query, positions, kv, blocks, slab_stride, head, scale, inner,
        whole, full, begin,
        KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE, KEYS, WINDOW, CAPPED, False,
        TRANSPOSED, CAST,
    )
    acc, top, total = fold(
        acc, top, total, query, positions, kv, blocks, slab_stride, head, scale, inner,
        full, stop, begin,
        KV_HEADS, DIM, PAD_DIM, BLOCK_SIZE, KEYS, WINDOW, CAPPED, True,
        TRANSPOSED, CAST,
    )
    # fmt: on
    # Rows without a query may have seen no key.
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.trans(acc / total[None, :]) if TRANSPOSED else acc / total[:, None]
    to = tokens * out_token_stride + heads * out_head_stride
    tl.store(out + to[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    work: AttentionWork,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """out[t] = softmax(scale * q[t] K^T) V over the positions up to t's, for rows of more
    than one token; see `kernels.reference`.

    Shapes as for decodes.   Grid: (items, kv heads); programs of invalid items return at once.
    Bound by FLOPs, 4 * heads * head_dim per query and key.
    """
    capacity, (_, heads, dim) = len(work.prefill_items), q.shape
    kv_heads = kv.shape[2]
    if capacity == 0:
        return
    assert out.stride(2) == 1
    tiles = _prefill_tiles(dim, q.dtype, kv.dtype, q.device)
    assert work.prefill_queries * (heads // kv_heads) <= tiles.rows
    _prefill_kernel[(capacity, kv_heads)](
        out,
        q,
        kv,
        work.query_starts,
        work.seq_lens,
        work.block_starts,
        work.blocks,
        work.prefill_items,
        work.num_prefill_items,
        out.stride(0),
        out.stride(1),
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        *score_factors(dim, scale, softcap),
        **constants_of(q, kv, tiles, window, softcap),
        QUERIES=work.prefill_queries,
        TRANSPOSED=tiles.transposed,
    )
