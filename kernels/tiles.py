"""Layout of adapters in the arena, as far as kernels must know it; `lora.layout` has the rest."""

RANK_ROWS = 8
"""Rank rows of a tile: A's `[8, in]`, then B's, rank-major, `[8, out]`."""

MAX_RANK = 256
"""Highest rank of an adapter; the registry refuses higher ranks (registry/checks/validate.py)."""

ADDRESS_UNIT_BYTES = 256
"""Unit of tile addresses, int32 that count from the arena's first byte: 2**31 units are 512 GiB."""
