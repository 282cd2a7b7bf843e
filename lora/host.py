"""A packed adapter that is ready for the arena: in host memory, or in its file."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from kernels.tiles import ADDRESS_UNIT_BYTES
from lora.errors import AdapterError
from lora.host_region import HostRegion
from lora.layout import PROJECTIONS, Layout, Tile
from lora.packed import PackedForm, PackedHeader, check_header, read_header
from lora.shard import WHOLE, Shard

Copy = Callable[[Tensor, Tensor], object]

_READ_BYTES = 8 << 20
"""Of one read, then hashed while it is in the processor's cache. The GIL is free during both."""


@dataclass(frozen=True)
class PackedAdapter:
    """What a packed file says, and where the slabs are that it holds of this rank's shard.

    slabs: [slabs, slab_bytes] uint8 of host memory, where the adapter has `region_slabs`, in order;
    None where the arena is host memory itself: then they go there straight from the file.
    slabs_start: bytes into the file.   checksum: sha256 of the slabs, hex.
    scales: [layers, projections] float32.
    """

    header: PackedHeader
    dtype: torch.dtype
    scales: torch.Tensor
    path: Path
    slabs_start: int
    checksum: str
    slabs: torch.Tensor | None = None
    region_slabs: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return self.header.digest

    @property
    def base_revision(self) -> str:
        return self.header.base_revision

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return self.header.tiles

    @property
    def invocation_tokens(self) -> tuple[int, ...] | None:
        return self.header.invocation_tokens

    @property
    def num_slabs(self) -> int:
        return self.header.num_slabs

    @property
    def size_bytes(self) -> int:
        """In the arena, of all ranks together."""
        return self.header.slabs_bytes

    @property
    def host_bytes(self) -> int:
        """In host memory outside it."""
        return len(self.region_slabs) * self.header.slab_bytes

    def copy_to(self, arena: torch.Tensor, slab_ids: list[int], copy: Copy = Tensor.copy_) -> None:
        """Fill these slabs of the arena, [slabs, slab_bytes] uint8, in order.

        copy: (target, source), of what is in host memory; it may only be begun. Slabs that are
        neighbours in both are copied at once.
        Raises FileNotFoundError; AdapterError("lost") when the file is not what it was.
        """
        if self.slabs is None:
            self.read_to(_runs_of(arena, slab_ids))
            return
        for start, end in _runs(slab_ids, self.region_slabs):
            target, source = slab_ids[start], self.region_slabs[start]
            length = end - start
            copy(arena[target : target + length], self.slabs[source : source + length])

    def read_to(self, targets: Sequence[torch.Tensor]) -> None:
        """Fill these, [slabs, slab_bytes] uint8 each, one after the other from the file.

        Raises FileNotFoundError; AdapterError("lost"), and then they are zeros.
        """
        hasher = hashlib.sha256()
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.slabs_start)
            for target in targets:
                _read_into(target, file, hasher)
        if hasher.hexdigest() != self.checksum:
            for target in targets:
                target.zero_()  # it may hold KV next, and what is not finite there would stay
            raise AdapterError("lost", f"the slabs of the packed file of {self.digest} are damaged")

    def tile_table(self, layout: Layout, slab_ids: list[int]) -> torch.Tensor:
        """[layers, projections, tiles] int32 addresses for slabs of these ids; -1 is no tile."""
        depth = max(tile.index for tile in self.tiles) + 1
        addresses = [-1] * (layout.shape.num_layers * len(PROJECTIONS) * depth)
        for tile in self.tiles:
            row = tile.layer * len(PROJECTIONS) + tile.projection
            start = slab_ids[tile.slab] * layout.units_per_slab
            addresses[row * depth + tile.index] = start + tile.offset_bytes // ADDRESS_UNIT_BYTES
        table = torch.tensor(addresses, dtype=torch.int32)
        return table.view(layout.shape.num_layers, len(PROJECTIONS), depth)


def open_packed(path: Path, digest: str, form: PackedForm, shard: Shard = WHOLE) -> PackedAdapter:
    """The packed adapter `digest`, its slabs left in the file at `path`.

    shard: the part of it that this rank needs, of `form.layout.num_shards`.

    Raises FileNotFoundError; AdapterError("lost") when it is damaged, or packed for another arena.
    """
    with path.open("rb") as file:
        header = read_header(file)
        slabs_start = file.tell()
    check_header(header, digest, form)
    assert shard.size == form.layout.num_shards, "a shard of another layout"
    slabs_start += shard.index * header.num_slabs * header.slab_bytes
    dtype: torch.dtype = getattr(torch, form.dtype)
    scales, checksum = _scales(header, form.layout), header.checksums[shard.index]
    return PackedAdapter(header, dtype, scales, path, slabs_start, checksum)


def read_packed(
    path: Path,
    digest: str,
    form: PackedForm,
    shard: Shard = WHOLE,
    region: HostRegion | None = None,
) -> PackedAdapter:
    """As open_packed, with its slabs in host memory: in a region, or in memory of its own.

    Slabs of a region are the caller's to give back. A file that needs more of them than are free is
    not the one that room was made for: AdapterError("lost").
    """
    packed = open_packed(path, digest, form, shard)
    if region is None:
        shape = (packed.num_slabs, packed.header.slab_bytes)
        region = HostRegion(torch.empty(shape, dtype=torch.uint8))
    if (region_slabs := region.take(packed.num_slabs)) is None:
        raise AdapterError("lost", f"the packed file of {digest} has grown since it was fetched")
    try:
        packed.read_to(_runs_of(region.memory, region_slabs))
    except BaseException:
        region.give_back(region_slabs)
        raise
    return replace(packed, slabs=region.memory, region_slabs=region_slabs)


def _runs_of(memory: torch.Tensor, slab_ids: Sequence[int]) -> list[torch.Tensor]:
    """Slabs of `memory`, [slabs, slab_bytes], in order, neighbours together."""
    return [memory[slab_ids[start] : slab_ids[end - 1] + 1] for start, end in _runs(slab_ids)]


def _read_into(slabs: torch.Tensor, file: FileIO, hasher: "hashlib._Hash") -> None:
    """Fill `slabs` and hash them. What is cut short shows by its hash."""
    memory = slabs.view(-1).numpy().data
    for start in range(0, len(memory), _READ_BYTES):
        part = memory[start : start + _READ_BYTES]
        file.readinto(part)
        hasher.update(part)


def _runs(*lists: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where runs of neighbours in all of these lists start, and where they end."""
    first, length = 0, len(lists[0])
    for index in range(1, length + 1):
        if index == length or any(ids[index] != ids[index - 1] + 1 for ids in lists):
            yield first, index
            first = index


def _scales(header: PackedHeader, layout: Layout) -> torch.Tensor:
    scales = [[0.0] * len(PROJECTIONS) for _ in range(layout.shape.num_layers)]
    for layer, projection, scale in header.scales:
        scales[layer][projection] = scale
    return torch.tensor(scales, dtype=torch.float32)
