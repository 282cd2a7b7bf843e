"""Tiling of rows that belong to one program each, so that nothing splits their sums."""

import triton

MAX_COLUMNS = 16384
"""Most columns of a row: 32 to a thread of 16 warps, all in registers."""


def row_tile(columns: int) -> tuple[int, int]:
    """(columns of the tile, warps): 8 columns to a thread, which are 16 bytes in half precision,
    and more in the widest rows.
    """
    assert columns <= MAX_COLUMNS, "a model this wide is refused at start"
    tile = triton.next_power_of_2(columns)
    return tile, min(max(tile // 256, 1), 16)
