"""LoRA on a model's embedding: what adapters add to the embeddings of tokens, in plain torch.

A step adds a few rows of a few tiles here, so all kernels share this implementation.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.work import AdapterRuns, Tile
from kernels.work import Site


class EmbeddingLoRA:
    """Adds adapters' parts to embeddings. A row's bits depend on the row only.

    sites: one for each chunk of the vocabulary, with its tokens, in order; A of a chunk is
    [8, its tokens], B is [8, hidden].
    """

    def __init__(self, sites: Sequence[tuple[range, Site]]) -> None:
        self._sites = sites
        self._starts = [tokens.start for tokens, _ in sites]

    def add(self, y: torch.Tensor, token_ids: torch.Tensor, runs: AdapterRuns) -> None:
        """y[t] += scale * B @ A[:, token_ids[t]] for the tokens of each run, in place.

        y: [T, hidden].   token_ids: [T] int64.
        """
        ids = token_ids.tolist()
        for number, (first, end) in enumerate(runs.bounds.tolist()):
            rows_of: dict[int, list[int]] = {}
            for row in range(first, end):
                rows_of.setdefault(bisect_right(self._starts, ids[row]) - 1, []).append(row)
            for chunk, rows in rows_of.items():
                tokens, site = self._sites[chunk]
                (projection,) = site.projections
                tiles = runs.tiles(number, site, projection)
                if not tiles:  # the adapter adds no tokens
                    continue
                columns = [ids[row] - tokens.start for row in rows]
                scale = float(runs.scales[number][site.layer, projection])
                y[rows] += (scale * _sum_rows(tiles, columns)).to(y.dtype)


def _sum_rows(tiles: Sequence[Tile], columns: list[int]) -> torch.Tensor:
    """The sum over rank rows j of a[j, column] * b[j], [columns, hidden] float32.

    Rows are added one after the other, since a matrix product of another number of rows could sum
    in another order. It is numpy that adds them, as torch takes four times as long for so little.
    """
    total = np.zeros((len(columns), tiles[0][1].shape[1]), np.float32)
    for a, b in tiles:
        weights, rows = a[:, columns].float().numpy(), b.float().numpy()
        for weight, row in zip(weights, rows, strict=True):
            total += weight[:, None] * row
    return torch.from_numpy(total)
