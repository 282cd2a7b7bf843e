"""How adapters lie in the arena, as far as kernels must know it: see `lora.layout` for the rest."""

RANK_ROWS = 8
"""Rank rows of a tile: A's `[8, in]`, then B's, rank-major, `[8, out]`."""

MAX_RANK = 256
"""Of an adapter; what the registry takes at most (registry/validate.py)."""

ADDRESS_UNIT_BYTES = 256
"""Tile addresses are int32 and count these from the arena's first byte: 2**31 reach 512 GB."""
