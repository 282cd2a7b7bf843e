"""LoRA on arena tiles in plain torch: the reference for other kernels, also the CPU path.

Formula: Punica, arXiv 2310.18547, sec. 4: y += scale * (x @ A.T) @ B, per segment of tokens.
"""

from collections.abc import Sequence

import torch

Tile = tuple[torch.Tensor, torch.Tensor]
"""Rank rows of A, [8, in], and of B, rank-major, [8, out]; rows past the rank are zero."""


def add_lora(y: torch.Tensor, x: torch.Tensor, tiles: Sequence[Tile], scale: float) -> None:
    """y += scale * sum over tiles of (x @ A_tile.T) @ B_tile, in place.

    y: [T, out].   x: [T, in].   tiles: one module's, in the same dtype, as views of the arena.
    """
    for a, b in tiles:
        y.addmm_(x @ a.T, b, alpha=scale)
