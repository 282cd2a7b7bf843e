"""Attention over paged KV in torch, for which the rows and chunks of a step make no difference.

Every token is a query of its own, a decode as well as one of a chunk, and meets its keys in tiles
of KEY_TILE positions in order; a softmax is kept up to date from tile to tile. A tile takes two
batched products whose matrices are always of one shape, so a token's bits are its own. SDPA's are
not: it has one order of sums for a query, and another for many. The tokens behind a tile it is not
for keep what they have, to the bit: their weights are 0 and their sums are scaled by 1.

The functions are those of `kernels.attention`, which says what their arguments are.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.attention import gather

KEY_TILE = 64
"""Positions, or a block's where that is more; 32 and 128 take as long (100 to 400 positions)."""

_Fetch = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""tile, first -> its keys and values for the queries from `first` on, both [.., tile, dim]."""


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """seq_lens: rising."""
    rows, heads, dim = q.shape
    kv_heads, block_size = kv.shape[3:5]
    size, blocks = _whole_tiles(blocks, block_size)

    def fetch(number: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = blocks[first // kv_heads :, number * size : (number + 1) * size]
        k, v = gather(kv, layer, part)
        return k.flatten(0, 1), v.flatten(0, 1)

    grouped = q.reshape(rows * kv_heads, heads // kv_heads, dim)
    positions = (seq_lens - 1).repeat_interleave(kv_heads)
    return _attend(grouped, fetch, positions, size * block_size, window).view(rows, heads, dim)


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    blocks: Sequence[int],
    start: int,
    window: int | None = None,
) -> torch.Tensor:
    length, heads, dim = q.shape
    size, table = _whole_tiles(torch.tensor([blocks]), kv.shape[4])
    tile = size * kv.shape[4]
    pairs = torch.stack(gather(kv, layer, table))[:, 0].unflatten(2, (-1, tile))
    positions = torch.arange(start, start + length)

    def fetch_of(head: int) -> _Fetch:
        # The same keys for every token, not copied.
        def fetch(number: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = pairs[:, head, number].unsqueeze(1).expand(-1, length - first, -1, -1)
            return k, v

        return fetch

    grouped = q.unflatten(1, (kv.shape[3], -1)).unbind(1)
    parts = [_attend(g, fetch_of(h), positions, tile, window) for h, g in enumerate(grouped)]
    return torch.stack(parts, dim=1).view(length, heads, dim)


def _whole_tiles(blocks: torch.Tensor, block_size: int) -> tuple[int, torch.Tensor]:
    """Blocks of a tile, and the sequences' with as many of their last one as fill up a tile.

    blocks: [B, blocks].
    """
    size = -(-KEY_TILE // block_size)
    missing = -blocks.shape[1] % size
    return size, torch.cat((blocks, blocks[:, -1:].expand(-1, missing)), dim=1)


def _attend(
    q: torch.Tensor, fetch: _Fetch, positions: torch.Tensor, tile: int, window: int | None
) -> torch.Tensor:
    """q: [N, M, dim], M heads of a token.   positions: [N], rising.   tile: positions."""
    q = q * q.shape[2] ** -0.5
    out = torch.zeros_like(q)
    total = q.new_zeros(*q.shape[:2], 1)
    highest = torch.full_like(total, torch.finfo(q.dtype).min)
    first_seen = 0 if window is None else max(0, int(positions[0]) - window + 1)
    numbers = range(first_seen // tile, int(positions[-1]) // tile + 1)
    # Positions rise: whom a tile concerns are the last ones.
    firsts = torch.searchsorted(positions, torch.tensor(numbers) * tile).tolist()
    for number, first in zip(numbers, firsts, strict=True):
        keys, values = fetch(number, first)
        scores = _multiply(q[first:], keys.transpose(1, 2))
        hidden = _hidden(number * tile, tile, positions[first:], window)
        scores.masked_fill_(hidden[:, None], -torch.inf)
        higher = torch.maximum(highest[first:], scores.amax(dim=2, keepdim=True))
        weights, kept = torch.exp(scores - higher), torch.exp(highest[first:] - higher)
        highest[first:] = higher
        total[first:] = total[first:] * kept + weights.sum(dim=2, keepdim=True)
        out[first:] = out[first:] * kept + _multiply(weights, values)
    return out / total


def _hidden(start: int, tile: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which of the positions [start, start + tile) a query does not see, [N, tile]."""
    keys, queries = torch.arange(start, start + tile), queries[:, None]
    later = keys > queries
    return later if window is None else later | (keys <= queries - window)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm of two products at least: threads share a single one, in another order of sums."""
    return (
        torch.bmm(a, b) if len(a) > 1 else torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    )
