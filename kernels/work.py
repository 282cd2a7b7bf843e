"""What a step's kernels work on, as tensors on its device: who attends to what, whose adapter
applies where. Numbers that differ from step to step lie in memory, so that a captured graph serves
every step.
"""

from dataclasses import dataclass

import torch

from kernels.tiles import RANK_ROWS

SPLIT_KEYS = 256
"""Positions of one split of a decode's keys. Fixed, so that no neighbour changes a row's bits. One
row of 1,024 positions and 8 kv heads is 32 programs; with 128 positions the partial sums would be
6 % of the bytes of K and V instead of 3 %, and a split would be two tiles of keys.
"""

MOST_DECODE_ITEMS = 1 << 14
"""Splits whose partial sums are in memory at a time: 256 MiB with 32 heads of 128 dimensions."""

CHUNK_FEATURES = 512
"""Input features that one plane of a shrink sums over. Fixed for the same reason."""

PAIR_ROWS = 2 * RANK_ROWS
"""Rank rows of the two tiles that one `tl.dot` takes: it wants 16 at least."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Row b's tokens are [query_starts[b], query_starts[b + 1]), the last of its seq_lens[b]
    positions, whose KV lies in the blocks from block_starts[b] on.

    query_starts: [B + 1] int32.   seq_lens: [B] int32; 0 for padding rows, whose output is free.
    block_starts: [B] int32, into blocks.   blocks: [..] int32.
    decode_items: [.., 2] int32, (row, split) for every split of the rows that have one token;
    a row's are neighbours, their splits rise by one. They are cut into parts of equal room, which
    are computed one after the other; part p has rows from p * ceil(B / parts) on.
    num_decode_items: [parts] int32, how many of a part's count.
    decode_ranges: [B, 2] int32, (first, end) of a row's among its part's; (0, 0) for other rows.
    prefill_items: [.., 2] int32, (row, tile) for every tile of queries of the rows that have more
    than one; tile i of a row is its queries [i * prefill_queries, (i + 1) * prefill_queries).
    num_prefill_items: [1] int32, how many of them count.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor
    decode_items: torch.Tensor
    num_decode_items: torch.Tensor
    decode_ranges: torch.Tensor
    prefill_items: torch.Tensor
    num_prefill_items: torch.Tensor
    prefill_queries: int


@dataclass(frozen=True, slots=True)
class LoRAWork:
    """Which adapter applies to which tokens. Tokens of an adapter are neighbours.

    arena: [slabs, elements] in the adapters' dtype, contiguous.
    blocks: [.., 8] int32, a `kernels.block.BLOCK` each; each token of the step is in one of them.
    pairs: [.., 2] int32, (block, pair) for all pairs of tiles of the blocks' adapters: pair p is
    rank rows [16 p, 16 p + 16).
    counts: [2] int32, how many of `blocks` and of `pairs` count.
    block_rows: most tokens of a block.   max_rank: columns of one projection in the planes.
    `blocks` and `pairs` begin at multiples of 16 bytes: kernels read them by wide loads.
    """

    arena: torch.Tensor
    blocks: torch.Tensor
    pairs: torch.Tensor
    counts: torch.Tensor
    block_rows: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class Site:
    """Projections of one layer that share their input, and lie side by side in their output.

    projections: neighbours among the `num_projections` of the tile tables.
    out_features: of each.   Where a model is sharded, features are those of this rank.
    """

    layer: int
    projections: tuple[int, ...]
    in_features: int
    out_features: tuple[int, ...]
    num_projections: int = 7

    @property
    def num_chunks(self) -> int:
        return -(-self.in_features // CHUNK_FEATURES)


@dataclass(frozen=True, slots=True)
class Delta:
    """What adapters add at a site: planes, from `shrink`, still to be expanded.

    planes: [.., T, projections * max_rank] float32, to be summed: one a chunk, or their sum.
    """

    planes: torch.Tensor
    work: LoRAWork
    site: Site


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm weights of every head of q and of k, [head_dim] each."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PenaltyWork:
    """What changes the logits of rows, before a token is chosen.

    entry_starts: [B + 1] int32; row b's entries are [entry_starts[b], entry_starts[b + 1]), one
    for each distinct token that it has seen.   entry_tokens: [..] int32, all of the vocabulary.
    entry_counts: [..] int32, how often the row has said it; 0 for tokens of the prompt only.
    pending: [B] int32, which of `previous` the row has said last, though it is not among its
    entries' counts; -1 for none.   previous: [..] int32, tokens of the step before.
    repetition, frequency, presence: [B] float32; 1, 0 and 0 are off.
    bias_starts: [B + 1] int32, bias_tokens: [..] int32, bias: [..] float32, as the entries.
    """

    entry_starts: torch.Tensor
    entry_tokens: torch.Tensor
    entry_counts: torch.Tensor
    pending: torch.Tensor
    previous: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    bias_starts: torch.Tensor
    bias_tokens: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """How rows choose, [B] each.

    temperature: float32, 0 is greedy.   min_p, top_p: float64.   top_k: int32, 0 is off.
    uniform: float64 in [0, 1), the one number that a row draws.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor
