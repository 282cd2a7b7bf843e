"""Random adapters in an arena, without files: slabs are random, tables say where tiles lie."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from bench.gpu.machine import Machine
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from lora.batch import DeviceTables
from lora.layout import PROJECTIONS, Layout
from lora.packed import PackedForm

BASE_REVISION = "random"


def make_form(machine: Machine, layout: Layout) -> PackedForm:
    return PackedForm(layout, machine.dtype_name, BASE_REVISION)


def fill_tiles(slabs: torch.Tensor, layout: Layout, dtype: torch.dtype) -> None:
    """Fill slabs of adapters with random numbers, of the variance with which A keeps its input's.

    slabs: [.., slab_bytes] uint8.
    """
    slabs.view(dtype).normal_(std=layout.shape.hidden_size**-0.5)


def place(form: PackedForm, ranks: Sequence[int], there: torch.device) -> list[DeviceTables]:
    """Return tables of adapters on every projection, one behind the other from slab 0 on. Ranks are
    multiples of 8, so that tiles are whole. An adapter's output is about half as large as the
    output it is added to.
    """
    tables, first = [], 0
    for number, rank in enumerate(ranks):
        places, num_slabs = _places(form.layout, rank)
        table = (places + first * form.layout.units_per_slab).to(there)
        scales = torch.full(places.shape[:2], _scale(form.layout, rank), device=there)
        tables.append(DeviceTables(f"adapter {number}", BASE_REVISION, table, scales))
        first += num_slabs
    return tables


def num_slabs(layout: Layout, ranks: Sequence[int]) -> int:
    """Number of slabs that `place` takes."""
    return sum(_places(layout, rank)[1] for rank in ranks)


@lru_cache
def _places(layout: Layout, rank: int) -> tuple[torch.Tensor, int]:
    """Return the places of the tiles, [layers, projections, tiles] int32, of an adapter that lies
    from slab 0 on, and its number of slabs.
    """
    assert rank % RANK_ROWS == 0
    layers = range(layout.shape.num_layers)
    tiles, slabs = layout.pack({(layer, p): rank for layer in layers for p in range(7)})
    places = torch.empty(len(layers), len(PROJECTIONS), rank // RANK_ROWS, dtype=torch.int32)
    for tile in tiles:
        at = tile.slab * layout.units_per_slab + tile.offset_bytes // ADDRESS_UNIT_BYTES
        places[tile.layer, tile.projection, tile.index] = at
    return places, slabs


def _scale(layout: Layout, rank: int) -> float:
    """Return an adapter's scale, a power of two: A times the scale is exact in any dtype."""
    exact = 0.5 * (layout.shape.hidden_size / rank) ** 0.5
    return 2.0 ** round(torch.tensor(exact).log2().item())
