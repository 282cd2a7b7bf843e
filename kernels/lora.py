"""LoRA on arena tiles: the plain-torch meaning, which is also the CPU path.

Formula: Punica, arXiv 2310.18547, sec. 4: y += scale * (x @ A.T) @ B, per segment of tokens.
"""

from collections.abc import Sequence

import torch

_RANK_ROWS = 8


def add_lora(
    y: torch.Tensor, x: torch.Tensor, arena: torch.Tensor, offsets: Sequence[int], scale: float
) -> None:
    """y += scale * sum over tiles of (x @ A_tile.T) @ B_tile, in place.

    y: [T, out].   x: [T, in], same dtype.   arena: flat elements of that dtype.
    offsets: where each tile starts, in elements: A rows [8, in], then B rows, rank-major, [8, out].
    Rows past the rank are zero in the arena.
    """
    width_a, width_b = x.shape[1], y.shape[1]
    for offset in offsets:
        middle = offset + _RANK_ROWS * width_a
        a = arena[offset:middle].view(_RANK_ROWS, width_a)
        b = arena[middle : middle + _RANK_ROWS * width_b].view(_RANK_ROWS, width_b)
        y.addmm_(x @ a.T, b, alpha=scale)
