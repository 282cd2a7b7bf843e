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
    pages = kv[:, layer].index_select(0, torch.tensor(blocks, device=q.device))
    # [k or v, kv heads, positions, head_dim]
    sequence = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start + length]
    k, v = sequence.repeat_interleave(heads // sequence.shape[1], dim=1).unsqueeze(1)
    q = q.transpose(0, 1)[None]
    keys = torch.arange(start + length, device=q.device)
    queries = keys[start:, None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return out[0].transpose(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-2, -1)).mul_(scale or dim**-0.5)
    weights = soft_cap_(scores, softcap).masked_fill_(~visible, -torch.inf).softmax(dim=-1)
    return (weights @ v.to(wide)).to(q.dtype)[0].transpose(0, 1)
