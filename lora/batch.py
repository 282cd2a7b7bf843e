"""Tables that tell the kernels which adapter's tiles apply to which tokens of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.work import AdapterRuns
from lora.host import PackedAdapter
from lora.layout import Layout


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class DeviceTables:
    """Addresses and scales of an adapter in the arena.

    tile_table: [layers, projections, tiles] int32.   scales: [layers, projections] float32. Chunks
    of the model's ends are further layers, see `lora.layout`.
    has_head, has_embedding: whether it changes the model's head, and its embedding.
    num_added: tokens that it adds to the vocabulary.
    number: counts the engine's placements; ranks that share a model name a placement by it.
    """

    digest: str
    base_revision: str
    tile_table: torch.Tensor
    scales: torch.Tensor
    number: int = 0
    has_head: bool = False
    has_embedding: bool = False
    num_added: int = 0

    @property
    def num_pairs(self) -> int:
        """Number of tile pairs of the module with the highest rank."""
        return -(-self.tile_table.shape[2] // 2)

    @classmethod
    def of(
        cls,
        packed: PackedAdapter,
        layout: Layout,
        slabs: list[int],
        arena: torch.Tensor,
        copy: Callable[[torch.Tensor], torch.Tensor] = _keep,
    ) -> "DeviceTables":
        """Make the tables of `packed`, which lies in `slabs` of `arena`, [slabs, slab_bytes] uint8.

        copy: begins a tensor's copy to the arena's device, if the arena is not in host memory.
        """
        of_arena = (len(slabs), arena.shape[1])
        assert (packed.num_slabs, packed.header.slab_bytes) == of_arena, "packed for another arena"
        table = packed.tile_table(layout, slabs)
        places = {(tile.layer, tile.projection) for tile in packed.header.tiles}
        return cls(
            packed.digest,
            packed.header.base_revision,
            copy(table),
            copy(packed.scales),
            has_head=not places.isdisjoint(layout.head_places),
            has_embedding=not places.isdisjoint(layout.embedding_places),
            num_added=packed.header.num_added,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a step that use one adapter."""

    start: int
    end: int
    tables: DeviceTables


def adapter_runs(segments: Sequence[Segment], arena: torch.Tensor) -> AdapterRuns:
    """Segments in the form of the CPU kernels. arena: [slabs, elements] in the adapters' dtype."""
    bounds = [(segment.start, segment.end) for segment in segments]
    return AdapterRuns(
        arena=arena,
        bounds=torch.tensor(bounds, dtype=torch.int32).view(-1, 2),
        tile_tables=tuple(segment.tables.tile_table for segment in segments),
        scales=tuple(segment.tables.scales for segment in segments),
    )
