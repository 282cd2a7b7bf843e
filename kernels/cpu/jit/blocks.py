"""Layout of keys and values in a block of the KV cache.

A block is [layer, k or v, kv head, ..]; keys are [head_dim, token], values [token, head_dim]. So a
channel of 16 keys is one vector, and the keys' scores need no sum over lanes.
"""

from typing import NamedTuple

from numba import njit
from numba.core.types import NamedUniTuple, int64

from kernels.cpu.jit.compiled import INLINED


class Heads(NamedTuple):
    """Shape of the KV cache.   slab: number of float32 from one KV block to the next."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    slab: int


HEADS = NamedUniTuple(int64, 5, Heads)


@njit(**INLINED)
def begins(heads, block, head, offset):
    """Offsets in `kv` of a kv head's keys and values in a block, from its token `offset` on."""
    size, dim = heads.block_size, heads.head_dim
    keys = block * heads.slab + head * dim * size
    return keys + offset, keys + heads.num_kv_heads * dim * size + offset * dim
