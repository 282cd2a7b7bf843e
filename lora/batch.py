"""Which adapter's tiles apply to which tokens of a step, and their application."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kernels.lora import Tile, add_lora
from kernels.tiles import RANK_ROWS
from lora.host import PackedAdapter
from lora.layout import PROJECTIONS, Layout
from lora.layout import Tile as PlacedTile


@dataclass(frozen=True)
class DeviceTables:
    """An adapter in the arena. tile_table: [layers, projections, tiles] int32.
    scales: [layers, projections] float32.

    tiles, scale_values: the same by [layer][projection], as views of the arena and plain floats,
    where the arena is host memory; kernels read the tensors. Made once when it is placed, not in
    every step: LoRA 59 -> 41 ms of a step with 12 adapters (135M shape, one thread).
    """

    digest: str
    base_revision: str
    tile_table: torch.Tensor
    scales: torch.Tensor
    tiles: tuple[tuple[tuple[Tile, ...], ...], ...] = ()
    scale_values: tuple[tuple[float, ...], ...] = ()

    @property
    def num_pairs(self) -> int:
        """Pairs of tiles of the module with the highest rank."""
        return -(-self.tile_table.shape[2] // 2)

    @classmethod
    def of(
        cls, packed: PackedAdapter, layout: Layout, slabs: list[int], arena: torch.Tensor
    ) -> "DeviceTables":
        """arena: [slabs, slab_bytes] uint8 in host memory; `packed` lies in its `slabs`."""
        table = _table(packed, layout, slabs, arena)
        views: list[list[list[Tile]]] = [
            [[] for _ in PROJECTIONS] for _ in range(layout.shape.num_layers)
        ]
        for tile, view in _views(packed, layout, slabs, arena):
            views[tile.layer][tile.projection].append(view)
        return cls(
            digest=packed.digest,
            base_revision=packed.base_revision,
            tile_table=table,
            scales=packed.scales,
            tiles=tuple(tuple(map(tuple, layer)) for layer in views),
            scale_values=tuple(map(tuple, packed.scales.tolist())),
        )

    @classmethod
    def on_device(
        cls,
        packed: PackedAdapter,
        layout: Layout,
        slabs: list[int],
        arena: torch.Tensor,
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> "DeviceTables":
        """arena: [slabs, slab_bytes] uint8 on a device.   copy: begins a tensor's copy to it."""
        table = _table(packed, layout, slabs, arena)
        return cls(packed.digest, packed.base_revision, copy(table), copy(packed.scales))


def _table(
    packed: PackedAdapter, layout: Layout, slabs: list[int], arena: torch.Tensor
) -> torch.Tensor:
    of_arena = (len(slabs), arena.shape[1])
    assert (packed.num_slabs, packed.header.slab_bytes) == of_arena, "packed for another arena"
    return packed.tile_table(layout, slabs)


def _views(
    packed: PackedAdapter, layout: Layout, slabs: list[int], arena: torch.Tensor
) -> Iterator[tuple[PlacedTile, Tile]]:
    """Every tile with the views of its A's and B's rows in the arena.

    Made for all neighbours of a projection at once, as `Layout.pack` places them, not tile by tile:
    3.6 -> 1.0 ms for rank 16 on every projection (135M shape), with the GIL that the engine wants.
    """
    elems = arena.view(packed.dtype)
    for (projection, slab), run in groupby(packed.tiles, lambda t: (t.projection, t.slab)):
        tiles = list(run)
        width_a, width_b = layout.shape.features(projection)
        size_bytes = layout.tile_bytes(projection)
        assert tiles[-1].offset_bytes == tiles[0].offset_bytes + (len(tiles) - 1) * size_bytes
        stride = size_bytes // layout.itemsize
        in_slab = tiles[0].offset_bytes // layout.itemsize
        start = elems.storage_offset() + slabs[slab] * elems.stride(0) + in_slab
        middle = start + RANK_ROWS * width_a
        a = elems.as_strided((len(tiles), RANK_ROWS, width_a), (stride, width_a, 1), start)
        b = elems.as_strided((len(tiles), RANK_ROWS, width_b), (stride, width_b, 1), middle)
        yield from zip(tiles, zip(a.unbind(), b.unbind(), strict=True), strict=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of the step use this adapter."""

    start: int
    end: int
    tables: DeviceTables


@dataclass(frozen=True)
class LoRABatch:
    """A step's adapters, by neighbouring tokens."""

    segments: Sequence[Segment]

    def apply(self, y: torch.Tensor, x: torch.Tensor, layer: int, projection: int) -> None:
        """y[t] += scale * B @ A @ x[t] for every token t with an adapter that has this module.

        y: [T, out], changed in place.   x: [T, in].   projection: an index into PROJECTIONS.
        Tokens on the base model are left alone.
        """
        for segment in self.segments:
            if tiles := segment.tables.tiles[layer][projection]:
                tokens = slice(segment.start, segment.end)
                scale = segment.tables.scale_values[layer][projection]
                add_lora(y[tokens], x[tokens], tiles, scale)
