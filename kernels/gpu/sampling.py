"""Penalties, and sampling without sorting. Reference: `kernels.reference`.

A row of logits belongs to one program. Its tokens have weights exp((logit - highest) /
temperature), at most 1, whose float32 bits have the same order as the weights. A cut is the highest
weight that enough tokens reach, found bit by bit. Weights are summed as integers, whose sums agree
in any order, so that a draw neither runs past the end nor takes a token that was cut.
"""

import torch
import triton
import triton.language as tl

from kernels.work import PenaltyWork, SamplingWork

_WARPS = 16
_TILE = 4096
_UNROLL = tl.constexpr(2)
"""Tiles that a loop unrolls, so that each thread has four loads of 16 bytes in flight."""

_MAX_VOCAB = 1 << 20

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNITS = tl.constexpr(float(1 << 40))
"""Fixed point: a weight of 1 is 2**40, so that no sum overflows int64, and 2**-24 keeps 16 bits."""

_LANES = tl.constexpr(2048)
"""Lanes that a row's tokens are dealt to; each keeps its four highest weights. If tokens are dealt
at random, these include about the 700 highest of the row: four of the n highest fall into one lane
once n**4 reaches 4! * lanes**3.
"""

_TOP_BIT = tl.constexpr(1 << 29)
"""Highest bit of the float32 1.0."""

_PENALTY_TILE = 1024
_PENALTY_WARPS = 4


# ---- bias and penalties ----


@triton.jit
def _penalized(value, count, repetition, frequency, presence):
    value = tl.where(value > 0, value / repetition, value * repetition)
    return value - (count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0))


# A step's packed input lies at any address; tensors that happen to be aligned get no kernel of
# their own.
@triton.jit(
    do_not_specialize_on_alignment=[
        "entry_starts", "entry_tokens", "entry_counts", "pending", "previous", "repetition",
        "frequency", "presence", "bias_starts", "bias_tokens", "bias",
    ]
)  # fmt: skip
def _adjust_kernel(
    logits,
    entry_starts,
    entry_tokens,
    entry_counts,
    pending,
    previous,
    repetition,
    frequency,
    presence,
    bias_starts,
    bias_tokens,
    bias,
    row_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    lane = tl.arange(0, TILE)

    start, end = tl.load(bias_starts + row), tl.load(bias_starts + row + 1)
    for first in range(start, end, TILE):
        mask = first + lane < end
        token = tl.load(bias_tokens + first + lane, mask=mask, other=0)
        value = tl.load(logits + token, mask=mask, other=0.0)
        value += tl.load(bias + first + lane, mask=mask, other=0.0)
        tl.store(logits + token, value, mask=mask)

    start, end = tl.load(entry_starts + row), tl.load(entry_starts + row + 1)
    source = tl.load(pending + row)
    if (end > start) | (source >= 0):
        # Wait, because other threads may have added the bias of these tokens.
        tl.debug_barrier()
        last = tl.maximum(tl.load(previous + source, mask=source >= 0, other=0), 0)
        last = tl.where(source >= 0, last, -1)
        factor = tl.load(repetition + row)
        per_time = tl.load(frequency + row)
        once = tl.load(presence + row)
        # `missing` is the pending token until it is found among the entries; -1 is no token.
        missing = last
        for first in range(start, end, TILE):
            mask = first + lane < end
            token = tl.load(entry_tokens + first + lane, mask=mask, other=0)
            count = tl.load(entry_counts + first + lane, mask=mask, other=0)
            is_last = mask & (token == last)
            count += is_last.to(tl.int32)
            missing = tl.where(tl.max(is_last.to(tl.int32), 0) > 0, -1, missing)
            value = tl.load(logits + token, mask=mask, other=0.0)
            value = _penalized(value, count, factor, per_time, once)
            tl.store(logits + token, value, mask=mask)
        value = tl.load(logits + missing, mask=missing >= 0, other=0.0)
        value = _penalized(value, (missing >= 0).to(tl.int32), factor, per_time, once)
        tl.store(logits + missing, value, mask=missing >= 0)


def adjust_logits(logits: torch.Tensor, work: PenaltyWork) -> None:
    """Apply the bias, then repetition, frequency and presence penalties, in place.

    logits: [B, vocab] float32, rows contiguous.   A row's entries are distinct, and so are its
    biased tokens.   Grid: a program per row.   Bound by the latency of a few dependent loads; a row
    without bias and entries has three.
    """
    assert logits.stride(1) == 1
    _adjust_kernel[(len(logits),)](
        logits,
        work.entry_starts, work.entry_tokens, work.entry_counts, work.pending, work.previous,
        work.repetition, work.frequency, work.presence,
        work.bias_starts, work.bias_tokens, work.bias,
        logits.stride(0), TILE=_PENALTY_TILE, num_warps=_PENALTY_WARPS,
    )  # fmt: skip


# ---- parts of a draw ----
# Weights are handled as their bits, int32; `amounts`, int64, are the numbers that are summed.


@triton.jit
def _highest(logits, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """(the likeliest token, the lowest of equals; its logit; whether all logits are finite)."""
    best = tl.full((TILE,), -float("inf"), tl.float32)
    best_at = tl.zeros((TILE,), tl.int32)
    is_bad = tl.zeros((TILE,), tl.int32)
    lane = tl.arange(0, TILE)
    for first in tl.range(0, VOCAB, TILE, loop_unroll_factor=_UNROLL):
        mask = first + lane < VOCAB
        value = tl.load(logits + first + lane, mask=mask, other=0.0)
        is_bad |= (~(tl.abs(value) < float("inf"))).to(tl.int32)
        is_better = mask & (value > best)
        best = tl.where(is_better, value, best)
        best_at = tl.where(is_better, first + lane, best_at)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, best_at, VOCAB), 0)
    return token, peak, tl.max(is_bad, 0) == 0


@triton.jit
def _weights(logits, first, peak, scale, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Weights of TILE tokens from `first` on; 0 past the vocabulary's end."""
    token = first + tl.arange(0, TILE)
    value = tl.load(logits + token, mask=token < VOCAB, other=-float("inf"))
    return tl.exp2((value - peak) * scale).to(tl.int32, bitcast=True)


@triton.jit
def _amounts(weights, floor, COUNTED: tl.constexpr):
    """Amount of each weight: 1 if COUNTED, else the weight in units; 0 for those under `floor`."""
    if COUNTED:
        amounts = tl.full(weights.shape, 1, tl.int64)
    else:
        amounts = (weights.to(tl.float32, bitcast=True) * _UNITS).to(tl.int64)
    return tl.where(weights >= floor, amounts, 0)


@triton.jit
def _likeliest(logits, peak, scale, VOCAB: tl.constexpr):
    """The four highest weights of each lane, descending, and `beyond`: all above it are here."""
    a = tl.zeros((_LANES,), tl.int32)
    b, c, d = a, a, a
    for first in tl.range(0, VOCAB, _LANES, loop_unroll_factor=2 * _UNROLL):
        weights = _weights(logits, first, peak, scale, VOCAB, _LANES)
        a, weights = tl.maximum(a, weights), tl.minimum(a, weights)
        b, weights = tl.maximum(b, weights), tl.minimum(b, weights)
        c, weights = tl.maximum(c, weights), tl.minimum(c, weights)
        d = tl.maximum(d, weights)
    return a, b, c, d, tl.max(d, 0)


@triton.jit
def _amount_among(a, b, c, d, floor, COUNTED: tl.constexpr):
    """Amount of the lanes' weights, which is at most that of the row."""
    amounts = _amounts(a, floor, COUNTED) + _amounts(b, floor, COUNTED)
    amounts += _amounts(c, floor, COUNTED) + _amounts(d, floor, COUNTED)
    return tl.sum(amounts, 0)


@triton.jit
def _amount_of_row(
    logits, peak, scale, floor, COUNTED: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    amounts = tl.zeros((TILE,), tl.int64)
    for first in tl.range(0, VOCAB, TILE, loop_unroll_factor=_UNROLL):
        weights = _weights(logits, first, peak, scale, VOCAB, TILE)
        amounts += _amounts(weights, floor, COUNTED)
    return tl.sum(amounts, 0)


@triton.jit
def _highest_floor(
    logits, peak, scale, a, b, c, d, beyond, need,
    COUNTED: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest floor such that the tokens of at least this weight amount to `need` or more."""
    floor = 0
    bit = tl.full((), _TOP_BIT, tl.int32)
    while bit > 0:
        pivot = floor | bit
        amount = _amount_among(a, b, c, d, pivot, COUNTED)
        # The lanes' weights give a lower bound, which is exact for pivots above `beyond`.
        if (amount < need) & (pivot <= beyond):
            amount = _amount_of_row(logits, peak, scale, pivot, COUNTED, VOCAB, TILE)
        floor = tl.where(amount >= need, pivot, floor)
        bit = bit >> 1
    return floor


@triton.jit
def _cut(
    logits, peak, scale, min_p, top_k, top_p, VOCAB: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The lowest weight that min_p, top_k and top_p all keep."""
    floor = tl.minimum(min_p, 1.0).to(tl.float32).to(tl.int32, bitcast=True)
    counts = (top_k > 0) & (top_k < VOCAB)
    if counts | (top_p < 1):
        a, b, c, d, beyond = _likeliest(logits, peak, scale, VOCAB)
        if counts:
            kth = _highest_floor(
                logits, peak, scale, a, b, c, d, beyond, top_k.to(tl.int64), True, VOCAB, TILE
            )
            floor = tl.maximum(floor, kth)
        if top_p < 1:
            if floor > beyond:
                total = _amount_among(a, b, c, d, floor, False)
            else:
                total = _amount_of_row(logits, peak, scale, floor, False, VOCAB, TILE)
            need = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            # The tokens that reach the present floor have this amount: the new one is not lower.
            floor = _highest_floor(
                logits, peak, scale, a, b, c, d, beyond, need, False, VOCAB, TILE
            )
    return floor


@triton.jit
def _draw(
    logits, peak, scale, floor, uniform,
    VOCAB: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The first token at which the cumulative amount exceeds `uniform` times the total."""
    tiles = tl.arange(0, NUM_TILES)
    sums = tl.zeros((NUM_TILES,), tl.int64)
    for tile in tl.range(0, tl.cdiv(VOCAB, TILE), loop_unroll_factor=_UNROLL):
        weights = _weights(logits, tile * TILE, peak, scale, VOCAB, TILE)
        sums = tl.where(tiles == tile, tl.sum(_amounts(weights, floor, False), 0), sums)
    total = tl.sum(sums, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    tile = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(tiles < tile, sums, 0), 0)
    weights = _weights(logits, tile * TILE, peak, scale, VOCAB, TILE)
    cumulative = tl.cumsum(_amounts(weights, floor, False), 0)
    return tile * TILE + tl.sum((cumulative <= target).to(tl.int32), 0)


# ---- sampling ----


@triton.jit(
    do_not_specialize_on_alignment=["temperature", "min_p", "top_p", "top_k", "uniform"]
)  # fmt: skip
def _sample_kernel(
    tokens,
    logits,
    temperature,
    min_p,
    top_p,
    top_k,
    uniform,
    row_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    token, peak, is_finite = _highest(logits, VOCAB, TILE)
    heat = tl.load(temperature + row)
    if is_finite & (heat > 0):
        # The scale must be finite at any temperature: the likeliest token multiplies it by 0.
        scale = tl.minimum(1.0 / heat * _LOG2_E, 3e38)
        floor = _cut(
            logits, peak, scale,
            tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row), VOCAB, TILE,
        )  # fmt: skip
        token = _draw(logits, peak, scale, floor, tl.load(uniform + row), VOCAB, TILE, NUM_TILES)
    tl.store(tokens + row, tl.where(is_finite, token, -1))


def sample(logits: torch.Tensor, work: SamplingWork) -> torch.Tensor:
    """Choose a token for each row, [B] int32; -1 where a logit of the row is not finite.

    logits: [B, vocab] float32, rows contiguous.   Grid: a program per row.   Bound by how fast one
    multiprocessor reads a row, after the first time from L2: once for a greedy row, twice for a
    row that is drawn, with or without min_p, three times with top_k and four times with top_p. A
    cut that reaches deeper than the lanes' weights reads the row up to 30 times more.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert vocab <= _MAX_VOCAB
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows,)](
        tokens, logits, work.temperature, work.min_p, work.top_p, work.top_k, work.uniform,
        logits.stride(0), VOCAB=vocab, TILE=_TILE,
        NUM_TILES=triton.next_power_of_2(triton.cdiv(vocab, _TILE)), num_warps=_WARPS,
    )  # fmt: skip
    return tokens
