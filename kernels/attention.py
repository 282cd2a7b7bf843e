"""Attention over paged KV in plain torch: the reference for other kernels, also the CPU path.

A block is `[layer, k or v, kv head, token, head_dim]` and contiguous; a sequence is a list of
blocks.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.elementwise import is_finite, soft_cap_


def store_kv(
    kv: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """Write this step's keys and values to their slots; return which tokens are finite, [T] bool.

    kv: [blocks, layers, 2, kv heads, block_size, head_dim].   k, v: [T, kv heads, head_dim].
    slot_mapping: [T] int64, block * block_size + offset.
    Values that are not finite are written as 0. A stored NaN would spoil the results of every later
    owner of the block even under a mask, since 0 * NaN is NaN.
    """
    block_size = kv.shape[4]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    pair = torch.stack((k, v), dim=1)
    finite = is_finite(pair.flatten(1))
    # [block, token, k or v, kv head, head_dim]
    kv[:, layer].permute(0, 3, 1, 2, 4)[blocks, offsets] = pair.nan_to_num_(0.0, 0.0, 0.0)
    return finite


def gather(kv: torch.Tensor, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of sequences, each [B, kv heads, blocks * block_size, head_dim].

    blocks: [B, blocks] int64.
    """
    rows, depth = blocks.shape
    _, _, _, heads, size, dim = kv.shape
    pages = kv[:, layer].index_select(0, blocks.flatten()).view(rows, depth, 2, heads, size, dim)
    k, v = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, rows, heads, depth * size, dim)
    return k, v


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    blocks: Sequence[int],
    start: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend causally with a chunk of one sequence, positions [start, start + T).

    q: [T, heads, head_dim].   blocks: cover positions [0, start + T).   Result: like q.
    window: only the last `window` positions are seen, including the query's own; None for all.
    scale: factor of the scores; None for 1 / sqrt(head_dim).   softcap: bound of the scores, see
    `kernels.elementwise.soft_cap_`; None without one.
    """
    length, heads, dim = q.shape
    k, v = gather(kv, layer, torch.tensor([blocks], device=q.device))
    k, v = k[:, :, : start + length], v[:, :, : start + length]
    repeats = heads // k.shape[1]
    keys = torch.arange(start + length, device=q.device)
    queries = torch.arange(start, start + length, device=q.device)
    out = _attend(
        q.transpose(0, 1)[None],
        k.repeat_interleave(repeats, dim=1),
        v.repeat_interleave(repeats, dim=1),
        _visible(keys[None, :], queries[:, None], window),
        scale,
        softcap,
    )
    return out[0].transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend with q to k and v, [.., heads, tokens, head_dim] each.   visible: a mask of scores."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-2, -1)).mul_(scale or q.shape[-1] ** -0.5)
    hidden = ~visible
    weights = soft_cap_(scores, softcap).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    return (weights @ v.to(wide)).to(q.dtype)


def _visible(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether a query at one position sees a key at another; the positions are broadcast."""
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)
