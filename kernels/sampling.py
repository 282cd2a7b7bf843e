"""Sampling tokens from logits in plain torch: the reference for other kernels, also the CPU path.

    bias -> repetition -> frequency and presence -> restriction -> greedy, or
    temperature -> min_p -> top_k -> top_p -> one uniform number

Each cut keeps the tokens whose probability reaches a floor, so equally likely tokens are all kept
or all cut. A row's numbers come from that row only, by operations whose order does not depend on
other rows.
"""

from functools import cache

import torch
from torch.nn.functional import pad

_BANNED = -1e30
"""Logit of a token that must not be chosen: finite, as all logits must be, but of probability 0."""
_MASKED_ROWS = 16
"""How many rows of bits are unpacked at once, into a number for each token."""
_GROUP = 128
"""How many tokens share one maximum, which is found first: 40 us for a row of 131,072 tokens, where
`topk` over all of them takes 300.
"""
_DEPTHS = (256, 4096)
"""How many of the likeliest tokens are tried before the whole vocabulary is sorted (bench/LOG.md
has the timings).
"""


# ---- changes of logits by the request's options and by the tokens that it has seen ----
# Positions are `row * vocab + token`: only the few logits that change are touched.


def add_bias(logits: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor) -> None:
    """logits[positions] += bias, in place.   logits: [B, vocab].   positions, bias: [N]."""
    logits.view(-1).index_add_(0, positions, bias)


def penalize_repetition(
    logits: torch.Tensor, positions: torch.Tensor, penalty: torch.Tensor
) -> None:
    """Divide a seen token's logit by the penalty, or multiply it if it is negative, in place.

    logits: [B, vocab].   positions: [N] int64, each once or more often.   penalty: [B].
    Formula: CTRL, arXiv 1909.05858, section 4.1.
    """
    seen = positions.unique()
    values, factor = logits.view(-1)[seen], penalty[seen // logits.shape[1]]
    logits.view(-1)[seen] = torch.where(values > 0, values / factor, values * factor)


def penalize_frequency(
    logits: torch.Tensor,
    positions: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """logit -= count * frequency + (count > 0) * presence, in place: OpenAI's formula.

    logits: [B, vocab].   positions: [N] int64, one per occurrence.   frequency, presence: [B].
    """
    said, counts = positions.unique(return_counts=True)
    row = said // logits.shape[1]
    logits.view(-1)[said] -= counts * frequency[row] + presence[row]


def restrict(
    logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor, banned: torch.Tensor
) -> None:
    """Let `rows` choose allowed tokens only, and no row a banned token; change `logits` in place.

    logits: [B, vocab] float32.   rows: [..] int64.   allowed, banned: [..] int64, positions.
    Logits that are not finite stay so, because they fail the row.
    """
    flat = logits.view(-1)
    kept = flat[allowed]
    logits.index_copy_(0, rows, logits[rows] * 0 + _BANNED)
    flat[allowed] = kept
    flat.index_copy_(0, banned, flat[banned] * 0 + _BANNED)


def keep_bits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Let `rows` choose only tokens whose bit is set; change `logits` in place.

    logits: [B, vocab] float32.   rows: [n] int64.   bits: [n, ..] uint8, the lowest bit first.
    Logits that are not finite stay so, because they fail the row.
    """
    banned = _banned_by_byte(logits.device)
    for some, ours in zip(rows.split(_MASKED_ROWS), bits.split(_MASKED_ROWS), strict=True):
        added = torch.embedding(banned, ours.int()).flatten(1)[:, : logits.shape[1]]
        logits.index_add_(0, some, added)


@cache
def _banned_by_byte(device: torch.device) -> torch.Tensor:
    """A table of what each byte of a mask adds to its eight logits, [256, 8] float32.

    Reading it is ten times as fast as shifting bits.
    """
    places = torch.arange(8, device=device)
    is_kept = torch.arange(256, device=device)[:, None] >> places & 1
    return (1 - is_kept) * _BANNED


# ---- sampling ----


def probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) in float32.   logits: [B, vocab].   temperature: [B] > 0."""
    # The highest logit is shifted to 0 first: a large one over a small temperature would overflow.
    below = logits.float() - logits.amax(dim=-1, keepdim=True)
    return torch.softmax(below.div_(temperature[:, None]), dim=-1)


def truncate(
    probs: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`probs` with 0 for tokens that are cut off; what remains is not scaled to sum to 1.

    probs: [B, vocab] float32.   min_p, top_p: [B] float64.   top_k: [B] int64, 0 is off.
    min_p keeps the tokens that have at least that share of the highest probability. Of these, top_k
    keeps the k likeliest. Of these, top_p keeps each token for which the likelier ones add up to
    less than that share of the total.
    """
    vocab = probs.shape[1]
    floor = torch.zeros_like(top_p)
    open_rows = torch.arange(len(probs), device=probs.device)
    for depth in sorted({min(depth, vocab) for depth in (*_DEPTHS, vocab)}):
        cuts = min_p[open_rows], top_k[open_rows], top_p[open_rows]
        floor[open_rows], is_certain = _floor(probs[open_rows], *cuts, depth)
        open_rows = open_rows[~is_certain]
        if not len(open_rows):
            break
    return probs.masked_fill(probs < floor[:, None].float(), 0.0)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, by inverting the cumulative distribution at `uniform`.

    probs: [B, vocab], of any sum.   uniform: [B] float64 in [0, 1).   Result: [B] int64.
    """
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The rounded target must stay below the total, because no token begins there.
    target = torch.minimum(
        uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def likeliest(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest logprobs of each row, descending; of equal ones the lower token id first.

    logprobs: [B, vocab], no NaN.   Result: logprobs and token ids, both [B, k].
    """
    padding = -logprobs.shape[1] % _GROUP
    padded = pad(logprobs, (0, padding), value=-torch.inf) if padding else logprobs
    groups = padded.view(len(padded), -1, _GROUP)
    highest = groups.amax(dim=-1)
    # k groups, so at least k tokens, reach the k-th highest group maximum: none below is returned.
    floor = highest.topk(min(k, highest.shape[1])).values[:, -1:]
    floor = floor if k <= highest.shape[1] else floor.fill_(-torch.inf)
    row, group = (highest >= floor).nonzero(as_tuple=True)
    values = groups[row, group]
    # topk does not specify which of equal values it takes: take and sort all that qualify.
    number, place = (values >= floor[row]).nonzero(as_tuple=True)
    row, token, value = row[number], group[number] * _GROUP + place, values[number, place]
    order = value.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    counts = row.bincount(minlength=len(logprobs))
    first = counts.cumsum(0) - counts
    picked = order[first[:, None] + torch.arange(k, device=order.device)]
    return value[picked], token[picked]


def _floor(
    probs: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest probability kept in each row, and whether `depth` tokens were enough to tell.

    Every depth that is enough gives the same answer: a longer prefix has the same beginning.
    """
    top = probs.topk(depth).values.double()
    kth = top.gather(1, (top_k[:, None] - 1).clamp(0, depth - 1)).squeeze(1)
    floor = torch.maximum(min_p * top[:, 0], torch.where(top_k > 0, kth, 0.0))
    kept = top.masked_fill(top < floor[:, None], 0.0)
    cumulative = kept.cumsum(dim=-1)
    total = torch.where(floor > 0, cumulative[:, -1], 1.0)
    is_in = (kept > 0) & (cumulative - kept < (top_p * total)[:, None])
    nucleus = kept.gather(1, is_in.sum(dim=-1, keepdim=True) - 1).squeeze(1)
    is_all = (floor > top[:, -1]) | (floor == 0) & (cumulative[:, -1] >= top_p)
    is_certain = (top_k <= depth) & ((top_p >= 1) | is_all)
    return torch.where(top_p < 1, torch.maximum(floor, nucleus), floor), is_certain
