"""Inputs of a step's kernels, as tensors on its device: which positions each row attends to, and
which adapter applies to which tokens. Numbers that differ from step to step lie in memory, so that
a captured graph serves every step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.tiles import RANK_ROWS

SPLIT_KEYS = 256
"""Positions of one split of a decode's keys. The number is fixed, so that other rows do not change
a row's bits. One row of 1,024 positions and 8 kv heads is 32 programs; with 128 positions the
partial sums would be 6 % of the bytes of K and V instead of 3 %, and a split would be two tiles of
keys.
"""

MOST_DECODE_ITEMS = 1 << 14
"""Most splits with partial sums in memory at a time: 256 MiB with 32 heads of 128 dimensions."""

CHUNK_FEATURES = 512
"""Input features that one plane of a shrink sums over; fixed for the same reason as SPLIT_KEYS."""

PAIR_ROWS = 2 * RANK_ROWS
"""Rank rows of the two tiles that one `tl.dot` takes: it needs at least 16."""


LEAST_DECODE_ROWS = 16
"""Rows of a tile of decodes, as `tl.dot` needs them, unless one query has more heads."""


def decode_queries(heads: int, kv_heads: int) -> int:
    """Most queries of a tile of decodes: as many as share K and V at no cost, as the heads of one
    query leave most of a tile empty. Tiles of a fixed number of rows have drafts attend with the
    bits with which their tokens would have been decoded.
    """
    return max(1, LEAST_DECODE_ROWS // (heads // kv_heads))


class Decode(NamedTuple):
    """A token of a row that decodes: the ints of a record of AttentionWork.

    token: place in the step.   length: positions that it sees.   block_start: of its row.
    num_queries: of its tile, which are adjacent tokens of a row.   split: the tile's first one.
    first_sum: place of its first split's partial sum in its part; each next one lies `num_queries`
    further.   num_sums: how many splits it sees.
    """

    token: int
    length: int
    block_start: int
    num_queries: int
    split: int
    first_sum: int
    num_sums: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Work of attention. Row b's tokens are [query_starts[b], query_starts[b + 1]), the last of its
    seq_lens[b] positions, whose KV lies in the blocks from block_starts[b] on.

    query_starts: [B + 1] int32.   seq_lens: [B] int32; 0 for padding rows, whose output is not
    defined.   block_starts: [B] int32, indices in `blocks`.   blocks: [..] int32.
    decodes: [D, 7] int32, a `Decode` for every token of the rows that decode: those of one token,
    and of few more if these are drafts. A tile's are adjacent. Padding is 0.
    decode_items: [.., 2] int32, (decode, split) for every split of every tile, by the place of its
    first token in `decodes`. The items are divided into parts of equal capacity, which are computed
    one after the other; part p has the decodes from p * ceil(D / parts) on. A part has room for
    as many items as it has partial sums: one of each query of each item.
    num_decode_items: [parts] int32, how many items of each part are valid.
    prefill_items: [.., 2] int32, (row, tile) for every tile of queries of the rows that do not
    decode; tile i of a row is its queries [i * prefill_queries, (i + 1) * prefill_queries).
    num_prefill_items: [1] int32, how many of these items are valid.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor
    decodes: torch.Tensor
    decode_items: torch.Tensor
    num_decode_items: torch.Tensor
    prefill_items: torch.Tensor
    num_prefill_items: torch.Tensor
    prefill_queries: int


@dataclass(frozen=True, slots=True)
class LoRAWork:
    """Work of LoRA: the adapter of each token. Tokens of one adapter are adjacent.

    arena: [slabs, elements] in the adapters' dtype, contiguous.
    blocks: [.., 8] int32, a `kernels.block.BLOCK` each; each token of the step is in one of them.
    pairs: [.., 2] int32, (block, pair) for all pairs of tiles of the blocks' adapters: pair p is
    rank rows [16 p, 16 p + 16).
    counts: [2] int32, how many of `blocks` and of `pairs` are valid.
    block_rows: most tokens of a block.
    `blocks` and `pairs` begin at multiples of 16 bytes, because kernels read them by wide loads.
    """

    arena: torch.Tensor
    blocks: torch.Tensor
    pairs: torch.Tensor
    counts: torch.Tensor
    block_rows: int


@dataclass(frozen=True, slots=True)
class Site:
    """Projections of one layer that share their input, and lie side by side in their output.

    projections: adjacent ones among the `num_projections` of the tile tables.
    out_features: one number per projection.   In a sharded model, features are those of this rank.
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
    """Contribution of adapters at a site, as planes from `shrink` that are still to be expanded.

    planes: [.., T, projections * MAX_RANK] float32, to be summed: one per chunk, or one in all.
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
    """Biases and penalties that change the logits of rows before a token is chosen.

    entry_starts: [B + 1] int32; row b's entries are [entry_starts[b], entry_starts[b + 1]), one
    for each distinct token that it has seen.   entry_tokens: [..] int32, all in the vocabulary.
    entry_counts: [..] int32, how often the row has generated the token; 0 for tokens that are in
    the prompt only.
    pending: [B] int32, index in `previous` of the row's latest token, which its entries' counts do
    not include yet; -1 for none.   previous: [..] int32, tokens of the step before.
    repetition, frequency, presence: [B] float32; 1, 0 and 0 are off.
    bias_starts: [B + 1] int32, bias_tokens: [..] int32, bias: [..] float32, laid out like the
    entries.
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
    """Sampling options of the rows, [B] each.

    temperature: float32, 0 is greedy.   min_p, top_p: float64.   top_k: int32, 0 is off.
    uniform: float64 in [0, 1), the one number that a row draws.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor
