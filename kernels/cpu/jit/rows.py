"""Norm, gated activation and LoRA, row by row.

The operations on a row do not depend on the rows beside it, so neither do its bits.
"""

import math

from numba import njit
from numba.core.types import UniTuple, float32, int64

from kernels.cpu.jit.compiled import INLINED, compiled
from kernels.cpu.jit.vector import (
    LANES,
    after,
    exp,
    floats,
    fma,
    ints,
    load,
    load_part,
    longs,
    splat,
    store,
    store_part,
    sum_lanes,
)
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS


@njit(**INLINED)
def _read(x, i, end):
    return load(x, i) if end - i >= LANES else load_part(x, i, end - i)


@njit(**INLINED)
def _write(x, i, end, value):
    if end - i >= LANES:
        store(x, i, value)
    else:
        store_part(x, i, value, end - i)


@njit(**INLINED)
def norm_factor(x, first, end, eps):
    """1 / rms of the values [first, end)."""
    squares = splat(0.0)
    for i in range(first, end, LANES):
        value = _read(x, i, end)
        squares = fma(value, value, squares)
    return float32(1.0) / math.sqrt(sum_lanes(squares) / float32(end - first) + eps)


@compiled(int64, int64, int64, int64, float32, int64)
def rms_norm(thread, threads, count, x, delta, weight, y, eps, dim):
    """y = weight * x / rms(x).   x, y, delta: [rows, dim]; x += delta first, unless delta is 0."""
    x, delta_of, weight, y = floats(x), floats(delta), floats(weight), floats(y)
    for row in range(thread, count, threads):
        first, end = row * dim, (row + 1) * dim
        if delta:
            for i in range(first, end, LANES):
                _write(x, i, end, _read(x, i, end) + _read(delta_of, i, end))
        factor = splat(norm_factor(x, first, end, eps))
        for i in range(first, end, LANES):
            scaled = _read(x, i, end) * factor
            _write(y, i, end, _read(weight, i - first, dim) * scaled)


@compiled(int64, int64, int64, int64)
def gated_product(thread, threads, count, gate_up, y, dim, is_gelu):
    """y = silu(gate) * up, or gelu(gate) * up.

    gate_up: [rows, 2 * dim], side by side.   y: [rows, dim].
    """
    gate_up, y = floats(gate_up), floats(y)
    for row in range(thread, count, threads):
        gates, ups, end = 2 * row * dim, (2 * row + 1) * dim, (2 * row + 1) * dim
        for i in range(0, dim, LANES):
            gate = _read(gate_up, gates + i, end)
            z = gate
            if is_gelu:  # by tanh: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
                z = splat(1.59576912) * gate * fma(splat(0.044715) * gate, gate, splat(1.0))
            active = gate / (splat(1.0) + exp(splat(0.0) - z))
            _write(y, row * dim + i, (row + 1) * dim, active * _read(gate_up, ups + i, end + dim))


@njit(**INLINED)
def _shrink(x, first, a, width, scale):
    """scale * x[first:][:width] @ a[r] for the eight rank rows of a tile."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(0.0)
    for i in range(0, width, LANES):
        value = _read(x, first + i, first + width)
        s0 = fma(value, _read(a, i, width), s0)
        s1 = fma(value, _read(a, i + width, 2 * width), s1)
        s2 = fma(value, _read(a, i + 2 * width, 3 * width), s2)
        s3 = fma(value, _read(a, i + 3 * width, 4 * width), s3)
        s4 = fma(value, _read(a, i + 4 * width, 5 * width), s4)
        s5 = fma(value, _read(a, i + 5 * width, 6 * width), s5)
        s6 = fma(value, _read(a, i + 6 * width, 7 * width), s6)
        s7 = fma(value, _read(a, i + 7 * width, 8 * width), s7)
    return (
        scale * sum_lanes(s0), scale * sum_lanes(s1), scale * sum_lanes(s2), scale * sum_lanes(s3),
        scale * sum_lanes(s4), scale * sum_lanes(s5), scale * sum_lanes(s6), scale * sum_lanes(s7),
    )  # fmt: skip


@njit(**INLINED)
def _expand(y, first, b, width, shrunk):
    """y[first:][:width] += shrunk @ b, one rank row after the other."""
    for i in range(0, width, LANES):
        value = _read(y, first + i, first + width)
        value = fma(splat(shrunk[0]), _read(b, i, width), value)
        value = fma(splat(shrunk[1]), _read(b, i + width, 2 * width), value)
        value = fma(splat(shrunk[2]), _read(b, i + 2 * width, 3 * width), value)
        value = fma(splat(shrunk[3]), _read(b, i + 3 * width, 4 * width), value)
        value = fma(splat(shrunk[4]), _read(b, i + 4 * width, 5 * width), value)
        value = fma(splat(shrunk[5]), _read(b, i + 5 * width, 6 * width), value)
        value = fma(splat(shrunk[6]), _read(b, i + 6 * width, 7 * width), value)
        value = fma(splat(shrunk[7]), _read(b, i + 7 * width, 8 * width), value)
        _write(y, first + i, first + width, value)


@compiled(*(int64,) * 5, UniTuple(int64, 3), *(int64,) * 3)
def add_lora(
    thread, threads, count, items, x, width, y, stride, outs, num_projections, line, arena
):  # fmt: skip
    """y += scale * (x @ A.T) @ B. Part i is projection i % num_projections of a site, for the
    tokens of item i // num_projections.

    items: [.., 5] int64, (first token, end, addresses of the tile table and the scales, depth).
    x: [T, width].   y: [T, stride], projections side by side.   outs: width of each projection, 0
    for none.   line: the site's first line in the tables.
    """
    items, x, y = longs(items), floats(x), floats(y)
    for part in range(thread, count, threads):
        item, projection = part // num_projections * 5, part % num_projections
        column, out = 0, outs[projection]
        for before in range(projection):
            column += outs[before]
        tiles, scales, depth = ints(items[item + 2]), floats(items[item + 3]), items[item + 4]
        scale = scales[line + projection]
        for i in range((line + projection) * depth, (line + projection + 1) * depth):
            if tiles[i] < 0:
                break
            tile = floats(arena + int64(tiles[i]) * ADDRESS_UNIT_BYTES)
            b = after(tile, RANK_ROWS * width)
            for token in range(items[item], items[item + 1]):
                shrunk = _shrink(x, token * width, tile, width, scale)
                _expand(y, token * stride + column, b, out, shrunk)
