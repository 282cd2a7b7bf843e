"""LoRA on a model that several ranks share: what lies between the two halves is summed over them.

    planes = sum over ranks of shrink(x);   expand(y, planes)

Where A is cut by its rows every rank fills columns of its own, where it is cut by its inputs every
rank has a part of each sum (S-LoRA, arXiv 2311.03285, sec. 5).
"""

from collections.abc import Iterator

import torch

from kernels.cpu.tile_views import TileViews
from kernels.cpu.work import AdapterRuns
from kernels.tiles import RANK_ROWS
from kernels.work import Site

_ROWS = 16
"""Tokens of one product: always as many, filled up with zeros: a token's bits are its own."""


class ShardedLoRA:
    """One rank's part of it, in plain torch."""

    def __init__(self) -> None:
        self._views = TileViews()

    def shrink(self, x: torch.Tensor, site: Site, runs: AdapterRuns) -> torch.Tensor:
        """What this rank adds to the planes, [T, projections * width] float32.

        x: [T, in].   width: eight columns for every tile of the deepest of the adapters.
        """
        width = _width(runs)
        planes = torch.zeros(len(x), len(site.projections) * width)
        for number, first, end in _parts(runs):
            rows = _filled(x[first:end])
            for place, projection in enumerate(site.projections):
                for index, (a, _) in enumerate(self._views.of(runs, number, site, projection)):
                    column = place * width + index * RANK_ROWS + site.first_row
                    product = torch.mm(rows, a.T)[: end - first]
                    planes[first:end, column : column + site.a_rows] = product
        return planes

    def expand(self, y: torch.Tensor, planes: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        """y += scale * planes @ B of this rank's outputs, in place.   y: [T, sum of out]."""
        width = _width(runs)
        outputs = y.split(site.out_features, dim=1)
        for number, first, end in _parts(runs):
            rows = _filled(planes[first:end])
            scales = runs.scales[number][site.layer].tolist()
            for place, (projection, output) in enumerate(
                zip(site.projections, outputs, strict=True)
            ):
                for index, (_, b) in enumerate(self._views.of(runs, number, site, projection)):
                    column = place * width + index * RANK_ROWS
                    shrunk = rows[:, column : column + RANK_ROWS].to(b.dtype)
                    output[first:end] += scales[projection] * torch.mm(shrunk, b)[: end - first]


def _width(runs: AdapterRuns) -> int:
    return RANK_ROWS * max(table.shape[2] for table in runs.tile_tables)


def _parts(runs: AdapterRuns) -> Iterator[tuple[int, int, int]]:
    """(run, first token, end) of _ROWS tokens of a run, or what is left of it."""
    for number, (start, end) in enumerate(runs.bounds.tolist()):
        for first in range(start, end, _ROWS):
            yield number, first, min(first + _ROWS, end)


def _filled(part: torch.Tensor) -> torch.Tensor:
    rows = part.new_zeros(_ROWS, part.shape[1])
    rows[: len(part)] = part
    return rows
