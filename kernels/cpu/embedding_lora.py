"""LoRA on a model's embedding: what adapters add to the embeddings of tokens, in plain torch.

A step adds a few rows of a few tiles here, so all kernels share this implementation.
"""

from collections.abc import Sequence

import torch

from kernels.cpu.tile_views import TileViews
from kernels.cpu.work import AdapterRuns
from kernels.lora import Tile
from kernels.work import Site


class EmbeddingLoRA:
    """Adds adapters' parts to embeddings. A row's bits depend on the row only.

    chunk_size: tokens of a chunk of the vocabulary.   sites: one for each chunk, in order; A of a
    chunk is [8, its tokens], B is [8, hidden].
    """

    def __init__(self, chunk_size: int, sites: Sequence[Site]) -> None:
        self._chunk_size = chunk_size
        self._sites = sites
        self._tiles = TileViews()

    def add(self, y: torch.Tensor, token_ids: torch.Tensor, runs: AdapterRuns) -> None:
        """y[t] += scale * B @ A[:, token_ids[t]] for the tokens of each run, in place.

        y: [T, hidden].   token_ids: [T] int64.
        """
        for number, (first, end) in enumerate(runs.bounds.tolist()):
            chunks = token_ids[first:end] // self._chunk_size
            columns = token_ids[first:end] % self._chunk_size
            for chunk in chunks.unique().tolist():
                site = self._sites[chunk]
                (projection,) = site.projections
                tiles = self._tiles.of(runs, number, site, projection)
                rows = (chunks == chunk).nonzero().view(-1)
                scale = float(runs.scales[number][site.layer, projection])
                y[first + rows] += scale * _sum_rows(tiles, columns[rows], y)


def _sum_rows(tiles: Sequence[Tile], columns: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum over rank rows j of a[j, column] * b[j], [columns, hidden].

    Rows are added one after the other, since a matrix product of another number of rows could sum
    in another order.
    """
    total = y.new_zeros(len(columns), y.shape[1], dtype=torch.float32)
    for a, b in tiles:
        weights = a[:, columns].float()
        for j in range(len(a)):
            total += weights[j, :, None] * b[j].float()
    return total.to(y.dtype)
