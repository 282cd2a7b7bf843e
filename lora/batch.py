"""Which adapter's tiles apply to which tokens of a step, and their application."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora import add_lora
from lora.layout import ADDRESS_UNIT_BYTES, Layout
from lora.weights import PackedAdapter


@dataclass(frozen=True)
class DeviceTables:
    """An adapter in the arena. tile_table: [layers, projections, tiles] int32.   scales: float32.

    addresses: the same table as plain ints, so that the CPU path never reads a tensor back.
    """

    digest: str
    tile_table: torch.Tensor
    scales: torch.Tensor
    addresses: tuple[tuple[tuple[int, ...], ...], ...]
    scale_values: tuple[tuple[float, ...], ...]

    @classmethod
    def of(
        cls, packed: PackedAdapter, layout: Layout, slabs: list[int], device: torch.device
    ) -> "DeviceTables":
        table = packed.tile_table(layout, slabs)
        addresses = tuple(
            tuple(tuple(a for a in tiles if a >= 0) for tiles in layer) for layer in table.tolist()
        )
        scale_values = tuple(tuple(row) for row in packed.scales.tolist())
        return cls(
            packed.digest, table.to(device), packed.scales.to(device), addresses, scale_values
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of the step use this adapter."""

    start: int
    end: int
    tables: DeviceTables


@dataclass(frozen=True)
class LoRABatch:
    """A step's adapters. arena: the whole arena as flat elements of the engine's dtype."""

    arena: torch.Tensor
    layout: Layout
    segments: Sequence[Segment]

    def apply(self, y: torch.Tensor, x: torch.Tensor, layer: int, projection: int) -> None:
        """y[t] += scale * B @ A @ x[t] for every token t with an adapter that has this module.

        y: [T, out], changed in place.   x: [T, in].   Tokens on the base model are left alone.
        """
        unit_elems = ADDRESS_UNIT_BYTES // self.layout.itemsize
        for segment in self.segments:
            addresses = segment.tables.addresses[layer][projection]
            if addresses:
                add_lora(
                    y[segment.start : segment.end],
                    x[segment.start : segment.end],
                    self.arena,
                    [address * unit_elems for address in addresses],
                    segment.tables.scale_values[layer][projection],
                )
