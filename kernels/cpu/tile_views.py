"""Tiles of adapters as views of the arena that they lie in."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.cpu.work import AdapterRuns
from kernels.lora import Tile
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from kernels.work import Site


class TileViews:
    """Views of tiles, made once per tile table and module, and dropped with the table."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, runs: AdapterRuns, number: int, site: Site, projection: int) -> tuple[Tile, ...]:
        """Tiles of one module of a run's adapter: A's rows, [8, in], and B's, [8, out]."""
        table = runs.tile_tables[number]
        known: dict[tuple[int, int], tuple[Tile, ...]] = self._known.setdefault(table, {})
        place = (site.layer, projection)
        if place not in known:
            out_features = site.out_features[site.projections.index(projection)]
            known[place] = tuple(
                _view(runs.arena, address, site, out_features)
                for address in table[place].tolist()
                if address >= 0
            )
        return known[place]


def _view(arena: torch.Tensor, address: int, site: Site, out_features: int) -> Tile:
    start = arena.storage_offset() + address * (ADDRESS_UNIT_BYTES // arena.itemsize)
    width = site.in_features
    a = arena.as_strided((RANK_ROWS, width), (width, 1), start)
    b = arena.as_strided((RANK_ROWS, out_features), (out_features, 1), start + RANK_ROWS * width)
    return a, b
