"""A packed adapter in host memory, read from its file in a few large reads."""

import hashlib
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch

from lora.errors import AdapterError
from lora.layout import ADDRESS_UNIT_BYTES, PROJECTIONS, Layout, Tile
from lora.packed import PackedForm, PackedHeader, check_header, read_header

_READ_BYTES = 8 << 20
"""Of one read, which is then hashed. The GIL is free during both, so few of them want it back.

1 MB reads take 21 ms for 20 MB, 4 to 64 MB reads 13 (135M shape, rank 16); the hash bounds it.
"""


@dataclass(frozen=True)
class PackedAdapter:
    """slabs: [num_slabs, slab_bytes] uint8 on the host.   scales: [layers, projections] float32."""

    digest: str
    base_revision: str
    dtype: torch.dtype
    slabs: torch.Tensor
    tiles: tuple[Tile, ...]
    scales: torch.Tensor
    invocation_tokens: tuple[int, ...] | None

    @property
    def num_slabs(self) -> int:
        return self.slabs.shape[0]

    @property
    def size_bytes(self) -> int:
        return self.slabs.numel()

    def tile_table(self, layout: Layout, slab_ids: list[int]) -> torch.Tensor:
        """[layers, projections, tiles] int32 addresses for slabs with places; -1 is no tile."""
        depth = max(tile.index for tile in self.tiles) + 1
        addresses = [-1] * (layout.shape.num_layers * len(PROJECTIONS) * depth)
        for tile in self.tiles:
            row = tile.layer * len(PROJECTIONS) + tile.projection
            start = slab_ids[tile.slab] * layout.units_per_slab
            addresses[row * depth + tile.index] = start + tile.offset_bytes // ADDRESS_UNIT_BYTES
        table = torch.tensor(addresses, dtype=torch.int32)
        return table.view(layout.shape.num_layers, len(PROJECTIONS), depth)


def read_packed(path: Path, digest: str, form: PackedForm, *, pin: bool) -> PackedAdapter:
    """The packed adapter `digest` at `path`. pin: into pinned memory, for copies to a device.

    Raises FileNotFoundError; AdapterError("lost") when it is damaged, or packed for another arena.
    """
    with path.open("rb") as file:
        header = read_header(file)
        check_header(header, digest, form)
        slabs = torch.empty(header.num_slabs, header.slab_bytes, dtype=torch.uint8, pin_memory=pin)
        if _read_into(slabs, file) != header.checksum:
            raise AdapterError("lost", f"the slabs of the packed file of {digest} are damaged")
    return PackedAdapter(
        digest=header.digest,
        base_revision=header.base_revision,
        dtype=getattr(torch, form.dtype),
        slabs=slabs,
        tiles=header.tiles,
        scales=_scales(header, form.layout),
        invocation_tokens=header.invocation_tokens,
    )


def _read_into(slabs: torch.Tensor, file: BufferedReader) -> str:
    """Fill `slabs`; the sha256 of what was read, hex."""
    memory = slabs.view(-1).numpy().data
    hasher = hashlib.sha256()
    for start in range(0, len(memory), _READ_BYTES):
        part = memory[start : start + _READ_BYTES]
        file.readinto(part)  # a file that was cut short is told by its checksum
        hasher.update(part)
    return hasher.hexdigest()


def _scales(header: PackedHeader, layout: Layout) -> torch.Tensor:
    scales = [[0.0] * len(PROJECTIONS) for _ in range(layout.shape.num_layers)]
    for layer, projection, scale in header.scales:
        scales[layer][projection] = scale
    return torch.tensor(scales, dtype=torch.float32)
