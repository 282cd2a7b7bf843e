"""Head norms and rotation of projections, and the write of keys and values to the cache."""

from numba import njit
from numba.core.types import float32, int64

from kernels.cpu.jit.blocks import HEADS, begins
from kernels.cpu.jit.compiled import INLINED, compiled
from kernels.cpu.jit.rows import norm_factor
from kernels.cpu.jit.vector import LANES, floats, ints, load, longs, splat, store, sum_lanes


@njit(**INLINED)
def _norm(x, first, weight, eps, dim):
    factor = splat(norm_factor(x, first, first + dim, eps))
    for i in range(0, dim, LANES):
        store(x, first + i, load(weight, i) * (load(x, first + i) * factor))


@njit(**INLINED)
def _rotate(x, first, cos, sin, angles, half, dim, scale):
    for i in range(half):
        low, high = x[first + i], x[first + half + i]
        x[first + i] = (low * cos[angles + i] - high * sin[angles + i]) * scale
        x[first + half + i] = (high * cos[angles + i] + low * sin[angles + i]) * scale
    for i in range(2 * half, dim):
        x[first + i] *= scale


@njit(**INLINED)
def _all_finite(x, first, end):
    zeros = splat(0.0)
    for i in range(first, end, LANES):
        zeros += load(x, i) - load(x, i)
    return sum_lanes(zeros) == 0.0


@njit(**INLINED)
def _write_kv(heads, kv, slot, qkv, first):
    """Write a token's keys and values, qkv[first:]; zeros if one of them is not finite."""
    dim, size, num = heads.head_dim, heads.block_size, heads.num_kv_heads
    block, offset = slot // size, slot % size
    is_finite = _all_finite(qkv, first, first + 2 * num * dim)
    for head in range(num):
        key, value = first + head * dim, first + (num + head) * dim
        keys, values = begins(heads, block, head, offset)
        for d in range(dim):
            kv[keys + d * size] = qkv[key + d] if is_finite else float32(0.0)
            kv[values + d] = qkv[value + d] if is_finite else float32(0.0)
    return is_finite


@compiled(HEADS, *(int64,) * 10, float32, float32)
def rope_store(
    thread, threads, count, heads, qkv, q_norm, k_norm, cos, sin, half, positions, slots, kv,
    finite, eps, scale,
):  # fmt: skip
    """Rotate tokens of qkv in place, scale their queries, write keys and values to the cache.

    qkv: [T, (heads + 2 * kv heads) * head_dim].   q_norm, k_norm: [head_dim], or 0.
    cos, sin: [positions, half]; the first 2 * half features of a head are rotated.
    positions, slots: [T] int64.   kv: the layer's part of the first block.
    finite: [T] int32, written: whether a token's keys and values are finite.
    scale: factor of the queries, and so of the scores.
    """
    dim = heads.head_dim
    with_keys = heads.num_heads + heads.num_kv_heads
    qkv, cos, sin, kv, finite = floats(qkv), floats(cos), floats(sin), floats(kv), ints(finite)
    positions, slots = longs(positions), longs(slots)
    for token in range(thread, count, threads):
        begin = token * (with_keys + heads.num_kv_heads) * dim
        for head in range(with_keys):
            is_query = head < heads.num_heads
            x = begin + head * dim
            if q_norm:
                _norm(qkv, x, floats(q_norm if is_query else k_norm), eps, dim)
            angles = positions[token] * half
            _rotate(qkv, x, cos, sin, angles, half, dim, scale if is_query else float32(1.0))
        finite[token] = _write_kv(heads, kv, slots[token], qkv, begin + heads.num_heads * dim)
