"""Packed adapters that are ready for the arena, in host memory or in their files."""

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
from lora.layout import Layout
from lora.packed import PackedForm, PackedHeader, check_header, read_header
from lora.shard import WHOLE, Shard

Copy = Callable[[Tensor, Tensor], object]

_READ_BYTES = 8 << 20
"""Size of one read, hashed while in the processor's cache. Both release the GIL."""


@dataclass(frozen=True)
class PackedAdapter:
    """Header of a packed file, and the place of the slabs of this rank's shard.

    slabs: [slabs, slab_bytes] uint8 of host memory; the adapter is in its `region_slabs`, in order.
    None if the arena itself is host memory, which is filled straight from the file.
    slabs_start: offset of the shard's slabs in the file, in bytes.
    checksum: sha256 of the shard's slabs, hex.   scales: [*layout.table_shape] float32.
    """

    header: PackedHeader
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
    def invocation_tokens(self) -> tuple[int, ...] | None:
        return self.header.invocation_tokens

    @property
    def num_slabs(self) -> int:
        return self.header.num_slabs

    @property
    def size_bytes(self) -> int:
        """Bytes that the adapter takes in the arenas of all ranks together."""
        return self.header.slabs_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the adapter takes in host memory outside the arena."""
        return len(self.region_slabs) * self.header.slab_bytes

    def copy_to(self, arena: torch.Tensor, slab_ids: list[int], copy: Copy = Tensor.copy_) -> None:
        """Fill these slabs of the arena, [slabs, slab_bytes] uint8, in order.

        copy: copies from host memory, (target, source), and may return before the copy is done.
        It is called once for each run of slabs that is contiguous in both.
        Raises FileNotFoundError; AdapterError("lost") if the file has changed.
        """
        if self.slabs is None:
            self.read_to(_runs_of(arena, slab_ids))
            return
        for start, end in _runs(slab_ids, self.region_slabs):
            target, source = slab_ids[start], self.region_slabs[start]
            length = end - start
            copy(arena[target : target + length], self.slabs[source : source + length])

    def read_to(self, targets: Sequence[torch.Tensor]) -> None:
        """Fill the targets, [slabs, slab_bytes] uint8 each, one after the other from the file.

        Raises FileNotFoundError; AdapterError("lost") after filling the targets with zeros.
        """
        hasher = hashlib.sha256()
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.slabs_start)
            for target in targets:
                _read_into(target, file, hasher)
        if hasher.hexdigest() != self.checksum:
            for target in targets:
                target.zero_()  # the slab may hold KV next, where values not finite would stay
            raise AdapterError("lost", f"the slabs of the packed file of {self.digest} are damaged")

    def tile_table(self, layout: Layout, slab_ids: list[int]) -> torch.Tensor:
        """Addresses of the tiles in these slabs, [*layout.table_shape, tiles] int32; -1: none."""
        depth = max(tile.index for tile in self.header.tiles) + 1
        num_layers, num_places = layout.table_shape
        addresses = [-1] * (num_layers * num_places * depth)
        for tile in self.header.tiles:
            row = tile.layer * num_places + tile.projection
            start = slab_ids[tile.slab] * layout.units_per_slab
            addresses[row * depth + tile.index] = start + tile.offset_bytes // ADDRESS_UNIT_BYTES
        table = torch.tensor(addresses, dtype=torch.int32)
        return table.view(num_layers, num_places, depth)


def open_packed(path: Path, digest: str, form: PackedForm, shard: Shard = WHOLE) -> PackedAdapter:
    """Open the packed adapter `digest` at `path`; its slabs stay in the file.

    shard: the part that this rank needs, one of `form.layout.num_shards`.

    Raises FileNotFoundError; AdapterError("lost") if the file is damaged or for another arena.
    """
    with path.open("rb") as file:
        header = read_header(file)
        slabs_start = file.tell()
    check_header(header, digest, form)
    assert shard.size == form.layout.num_shards, "a shard of another layout"
    slabs_start += shard.index * header.num_slabs * header.slab_bytes
    scales, checksum = _scales(header, form.layout), header.checksums[shard.index]
    return PackedAdapter(header, scales, path, slabs_start, checksum)


def read_packed(
    path: Path,
    digest: str,
    form: PackedForm,
    shard: Shard = WHOLE,
    region: HostRegion | None = None,
) -> PackedAdapter:
    """Open a packed adapter and read its slabs to host memory: to `region`, or to new memory.

    The caller gives the region's slabs back. Raises like open_packed, and AdapterError("lost") if
    the region has too few free slabs: then the file is not the one that room was made for.
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
    """Views of slabs of `memory`, [slabs, slab_bytes], in order, one for each contiguous run."""
    return [memory[slab_ids[start] : slab_ids[end - 1] + 1] for start, end in _runs(slab_ids)]


def _read_into(slabs: torch.Tensor, file: FileIO, hasher: "hashlib._Hash") -> None:
    """Fill `slabs` and hash them. A file that is cut short is recognized by the hash."""
    memory = slabs.view(-1).numpy().data
    for start in range(0, len(memory), _READ_BYTES):
        part = memory[start : start + _READ_BYTES]
        file.readinto(part)
        hasher.update(part)


def _runs(*lists: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Bounds [start, end) of the runs in which every list counts up by one."""
    first, length = 0, len(lists[0])
    for index in range(1, length + 1):
        if index == length or any(ids[index] != ids[index - 1] + 1 for ids in lists):
            yield first, index
            first = index


def _scales(header: PackedHeader, layout: Layout) -> torch.Tensor:
    num_layers, num_places = layout.table_shape
    scales = [[0.0] * num_places for _ in range(num_layers)]
    for layer, projection, scale in header.scales:
        scales[layer][projection] = scale
    return torch.tensor(scales, dtype=torch.float32)
