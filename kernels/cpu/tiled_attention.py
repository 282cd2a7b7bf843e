"""Batch-invariant attention over paged KV in torch: a step's rows and chunks do not change bits.

Every token, of a decode or of a chunk, is a query of its own. It takes its keys in order, in tiles
of KEY_TILE positions, with an online softmax. A tile takes two batched products whose matrices
always have the same shape, so a token's bits do not depend on other tokens. SDPA is not invariant:
it sums in one order for one query, and in another order for many. A tile that a token does not see
leaves the token's state unchanged to the bit: its weights are 0 and the sums are scaled by 1.

The functions are those of `kernels.attention`, which documents their arguments.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.attention import gather
from kernels.elementwise import soft_cap_

KEY_TILE = 64
"""Positions of a tile, or of a block if that has more; 32 and 128 take as long (100 to 400
positions).
"""

_Fetch = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(tile, first) -> the tile's keys and values for queries from `first` on, both [.., tile, dim]."""


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend like `kernels.attention`.   seq_lens: must rise."""
    rows, heads, dim = q.shape
    kv_heads, block_size = kv.shape[3:5]
    size, blocks = _whole_tiles(blocks, block_size)

    def fetch(number: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = blocks[first // kv_heads :, number * size : (number + 1) * size]
        k, v = gather(kv, layer, part)
        return k.flatten(0, 1), v.flatten(0, 1)

    grouped = q.reshape(rows * kv_heads, heads // kv_heads, dim)
    positions = (seq_lens - 1).repeat_interleave(kv_heads)
    out = _attend(grouped, fetch, positions, size * block_size, window, scale, softcap)
    return out.view(rows, heads, dim)


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
    length, heads, dim = q.shape
    size, table = _whole_tiles(torch.tensor([blocks]), kv.shape[4])
    tile = size * kv.shape[4]
    pairs = torch.stack(gather(kv, layer, table))[:, 0].unflatten(2, (-1, tile))
    positions = torch.arange(start, start + length)

    def fetch_of(head: int) -> _Fetch:
        # All tokens share the keys, which are expanded and not copied.
        def fetch(number: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = pairs[:, head, number].unsqueeze(1).expand(-1, length - first, -1, -1)
            return k, v

        return fetch

    grouped = q.unflatten(1, (kv.shape[3], -1)).unbind(1)
    parts = [
        _attend(group, fetch_of(head), positions, tile, window, scale, softcap)
        for head, group in enumerate(grouped)
    ]
    return torch.stack(parts, dim=1).view(length, heads, dim)


def _whole_tiles(blocks: torch.Tensor, block_size: int) -> tuple[int, torch.Tensor]:
    """Blocks per tile, and the sequences' blocks, padded with their last ones to whole tiles.

    blocks: [B, blocks].
    """
    size = -(-KEY_TILE // block_size)
    missing = -blocks.shape[1] % size
    return size, torch.cat((blocks, blocks[:, -1:].expand(-1, missing)), dim=1)


def _attend(
    q: torch.Tensor,
    fetch: _Fetch,
    positions: torch.Tensor,
    tile: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attended values, like q.

    q: [N, M, dim], M heads of a token.   positions: [N], rising.   tile: positions of a tile.
    """
    q = q * (scale or q.shape[2] ** -0.5)
    out = torch.zeros_like(q)
    total = q.new_zeros(*q.shape[:2], 1)
    highest = torch.full_like(total, torch.finfo(q.dtype).min)
    first_seen = 0 if window is None else max(0, int(positions[0]) - window + 1)
    numbers = range(first_seen // tile, int(positions[-1]) // tile + 1)
    # Positions rise, so the tokens that see a tile's first position are the last ones.
    firsts = torch.searchsorted(positions, torch.tensor(numbers) * tile).tolist()
    for number, first in zip(numbers, firsts, strict=True):
        keys, values = fetch(number, first)
        scores = _multiply(q[first:], keys.transpose(1, 2))
        if softcap is not None:
            soft_cap_(scores, softcap)
        hidden = _hidden(number * tile, tile, positions[first:], window)
        scores.masked_fill_(hidden[:, None], -torch.inf)
        higher = torch.maximum(highest[first:], scores.amax(dim=2, keepdim=True))
        weights, kept = torch.exp(scores - higher), torch.exp(highest[first:] - higher)
        highest[first:] = higher
        total[first:] = total[first:] * kept + weights.sum(dim=2, keepdim=True)
        out[first:] = out[first:] * kept + _multiply(weights, values)
    return out / total


def _hidden(start: int, tile: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Mask of the positions in [start, start + tile) that a query does not see, [N, tile]."""
    keys, queries = torch.arange(start, start + tile), queries[:, None]
    later = keys > queries
    return later if window is None else later | (keys <= queries - window)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm of at least two products: threads split a single one, in another order of sums."""
    return (
        torch.bmm(a, b) if len(a) > 1 else torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    )
