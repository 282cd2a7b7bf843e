"""Attention over paged KV, for decodes and prefill chunks alike.

A row is one query head of one token. Keys come 32 at a time, from fixed places, in order, under a
running maximum (arXiv 2205.14135). The operations on a row do not depend on the rows beside it, so
a token has the same bits decoded or prefilled, in any chunk, with any neighbours.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numba.core.types import float32, int64

from kernels.cpu.jit.blocks import HEADS, Heads, begins
from kernels.cpu.jit.compiled import INLINED, compiled
from kernels.cpu.jit.vector import (
    LANES,
    after,
    exp,
    floats,
    fma,
    ints,
    larger,
    largest_lane,
    load,
    longs,
    prefetch,
    splat,
    store,
    sum_lanes,
    within,
)

KEYS = 2 * LANES
"""Keys of one step of the softmax: two halves, each of which lies within one block."""

GROUP_ROWS = 4
"""Rows that share a key or value in a register; the last group is padded."""

# A row's state: the maximum, 32 weights, then the numbers that the maximum scales: 16 sums and
# head_dim values.
_WEIGHTS = LANES
_SUMS = _WEIGHTS + KEYS
_VALUES = _SUMS + LANES


class _Item(NamedTuple):
    """Rows of one kv head.

    first: the first token.   position: its position.   ratio: query heads per kv head.
    """

    head: int
    first: int
    position: int
    first_block: int
    num_rows: int
    ratio: int


@njit(**INLINED)
def _scores(q, dim, kv, stride, here, following):
    """Scores of four rows on 32 keys, by halves.   q: [head_dim, 4].

    here: offsets of the keys of both halves, [head_dim, 16], lines `stride` apart.
    following: the same for the next 32 keys, which are prefetched.
    """
    k0, k1, next0, next1 = here[0], here[1], following[0], following[1]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(0.0)
    for d in range(dim):
        first, second = load(kv, k0 + d * stride), load(kv, k1 + d * stride)
        prefetch(kv, next0 + d * stride)
        prefetch(kv, next1 + d * stride)
        value = splat(q[GROUP_ROWS * d])
        a0, b0 = fma(value, first, a0), fma(value, second, b0)
        value = splat(q[GROUP_ROWS * d + 1])
        a1, b1 = fma(value, first, a1), fma(value, second, b1)
        value = splat(q[GROUP_ROWS * d + 2])
        a2, b2 = fma(value, first, a2), fma(value, second, b2)
        value = splat(q[GROUP_ROWS * d + 3])
        a3, b3 = fma(value, first, a3), fma(value, second, b3)
    return (a0, b0), (a1, b1), (a2, b2), (a3, b3)


@njit(**INLINED)
def _capped(x, softcap):
    """softcap * tanh(x / softcap)"""
    powers = exp(x * splat(float32(2.0) / softcap))
    return splat(softcap) * (splat(1.0) - splat(2.0) / (powers + splat(1.0)))


@njit(**INLINED)
def _weigh(scores, end, window, softcap, row, size):
    """Turn a row's 32 scores into weights; the row sees the `window` keys before `end`.

    softcap: bound of the scores, 0 for none.   row: the row's state.
    """
    low = end - window
    first, second = scores
    if softcap > 0.0:
        first, second = _capped(first, softcap), _capped(second, softcap)
    first = within(low, end, first, splat(-np.inf))
    second = within(low - LANES, end - LANES, second, splat(-np.inf))
    top = largest_lane(larger(first, second))
    if top > row[0]:
        factor = exp(splat(row[0] - top))
        row[0] = top
        for i in range(_SUMS, size, LANES):
            store(row, i, load(row, i) * factor)
    # Weights are selected and not multiplied: values past a sequence may be NaN, and so are all
    # differences from the maximum while no key has been seen.
    highest = splat(row[0])
    first = within(low, end, exp(first - highest), splat(0.0))
    second = within(low - LANES, end - LANES, exp(second - highest), splat(0.0))
    store(row, _WEIGHTS, first)
    store(row, _WEIGHTS + LANES, second)
    store(row, _SUMS, load(row, _SUMS) + first + second)


@njit(**INLINED)
def _add_values(rows, size, weights, kv, v, following, first, end):
    """Add values [first, end) of 16, weighted, to four rows.   v: their start, [16, head_dim].

    weights: start of the first row's weights.   following: start of the next values, to prefetch.
    """
    dim = size - _VALUES
    for i in range(0, dim, LANES):
        at = _VALUES + i
        a0, a1 = load(rows, at), load(rows, at + size)
        a2, a3 = load(rows, at + 2 * size), load(rows, at + 3 * size)
        for t in range(first, end):
            value = load(kv, v + t * dim + i)
            prefetch(kv, following + t * dim + i)
            a0 = fma(splat(rows[weights + t]), value, a0)
            a1 = fma(splat(rows[weights + size + t]), value, a1)
            a2 = fma(splat(rows[weights + 2 * size + t]), value, a2)
            a3 = fma(splat(rows[weights + 3 * size + t]), value, a3)
        store(rows, at, a0)
        store(rows, at + size, a1)
        store(rows, at + 2 * size, a2)
        store(rows, at + 3 * size, a3)


@njit(**INLINED)
def _position_of(item, row):
    """Position of a row; rows that pad the last group are like the last row."""
    return item.position + min(row, item.num_rows - 1) // item.ratio


@njit(**INLINED)
def _attend_group(heads, item, window, softcap, q, rows, row, kv, base, here, following):
    """Attend with rows row .. row + 3 of an item to 32 keys from position `base` on."""
    dim, size = heads.head_dim, _VALUES + heads.head_dim
    low = max(0, _position_of(item, row) + 1 - window - base)
    high = min(KEYS, _position_of(item, row + GROUP_ROWS - 1) + 1 - base)
    if low >= high:
        return
    scores = _scores(q, dim, kv, heads.block_size, here, following)
    for r in range(GROUP_ROWS):
        end = _position_of(item, row + r) + 1 - base
        _weigh(scores[r], end, window, softcap, after(rows, r * size), size)
    middle = min(LANES, high)
    _add_values(rows, size, _WEIGHTS, kv, here[2], following[2], low, middle)
    low, high = max(0, low - LANES), high - LANES
    _add_values(rows, size, _WEIGHTS + LANES, kv, here[3], following[3], low, high)


@njit(**INLINED)
def _place(heads, blocks, item, position):
    """Offsets of the group of 16 keys, and of its values, that a position belongs to."""
    position = min(position, _position_of(item, item.num_rows))
    block, offset = divmod(position, heads.block_size)
    block = blocks[item.first_block + block]
    return begins(heads, block, item.head, offset // LANES * LANES)


@njit(**INLINED)
def _places(heads, blocks, item, base):
    """Offsets of the two groups of 16 keys from position `base` on, then of their values."""
    k0, v0 = _place(heads, blocks, item, base)
    k1, v1 = _place(heads, blocks, item, base + LANES)
    return k0, k1, v0, v1


@njit(**INLINED)
def _item(heads, items, i):
    ratio = heads.num_heads // heads.num_kv_heads
    num_rows = (items[i + 2] - items[i + 1]) * ratio
    return _Item(items[i], items[i + 1], items[i + 3], items[i + 4], num_rows, ratio)


@njit(**INLINED)
def _begin(heads, item, qkv, q, state):
    """Load an item's queries, [head_dim, 4] per group, and initialize its rows' states."""
    dim, size = heads.head_dim, _VALUES + heads.head_dim
    width = (heads.num_heads + 2 * heads.num_kv_heads) * dim
    for row in range(-(-item.num_rows // GROUP_ROWS) * GROUP_ROWS):
        token, head = divmod(min(row, item.num_rows - 1), item.ratio)
        query = (item.first + token) * width + (item.head * item.ratio + head) * dim
        group = row // GROUP_ROWS * GROUP_ROWS * dim + row % GROUP_ROWS
        for d in range(dim):
            q[group + d * GROUP_ROWS] = qkv[query + d]
        state[row * size] = -np.inf
        for i in range(_SUMS, size, LANES):
            store(state, row * size + i, splat(0.0))


@njit(**INLINED)
def _finish(heads, item, state, finite, out):
    dim, size = heads.head_dim, _VALUES + heads.head_dim
    for row in range(item.num_rows):
        token, head = item.first + row // item.ratio, item.head * item.ratio + row % item.ratio
        total = sum_lanes(load(state, row * size + _SUMS)) if finite[token] else float32(np.nan)
        for i in range(0, dim, LANES):
            value = load(state, row * size + _VALUES + i) / splat(total)
            # + 0 makes -0 a 0: a zero's sign depends on the number of keys that have no weight.
            store(out, (token * heads.num_heads + head) * dim + i, value + splat(0.0))


@compiled(HEADS, *(int64,) * 9, float32)
def attend(
    thread, threads, count, heads, items, blocks, qkv, out, finite, kv, window, scratch, size,
    softcap,
):  # fmt: skip
    """Compute the attended values of `count` items; NaN for tokens that are not finite.

    items: [.., 5] int64, (kv head, first token, end, position of the first, its sequence's
    first block among `blocks`).   blocks: int32.   qkv, kv, finite: as rope_store left them.
    out: [T, heads * head_dim].   scratch: [threads, size], see scratch_size.
    softcap: bound of the scores, 0 for none.
    """
    items, blocks, finite = longs(items), ints(blocks), ints(finite)
    qkv, out, kv, q = floats(qkv), floats(out), floats(kv), after(floats(scratch), thread * size)
    for i in range(thread, count, threads):
        item = _item(heads, items, 5 * i)
        rows_end = -(-item.num_rows // GROUP_ROWS) * GROUP_ROWS
        state = after(q, rows_end * heads.head_dim)
        _begin(heads, item, qkv, q, state)
        begin = max(0, item.position + 1 - window) // KEYS * KEYS
        end = _position_of(item, rows_end) + 1
        following = _places(heads, blocks, item, begin)
        for base in range(begin, end, KEYS):
            here, following = following, _places(heads, blocks, item, base + KEYS)
            for row in range(0, rows_end, GROUP_ROWS):
                queries = after(q, row * heads.head_dim)
                rows = after(state, row * (_VALUES + heads.head_dim))
                _attend_group(
                    heads, item, window, softcap, queries, rows, row, kv, base, here, following
                )
        _finish(heads, item, state, finite, out)


def scratch_size(tokens: int, heads: Heads) -> int:
    """Number of float32 that `attend` needs as scratch for items of `tokens` tokens."""
    ratio = heads.num_heads // heads.num_kv_heads
    groups = -(-tokens * ratio // GROUP_ROWS)
    return groups * GROUP_ROWS * (2 * heads.head_dim + _VALUES)
