"""Filling of a rank's arena slabs with packed adapters, from the file or from pinned memory."""

import math
from pathlib import Path

import torch

from kernels.tiles import MAX_RANK, RANK_ROWS
from lora.batch import DeviceTables
from lora.device import Device
from lora.host import PackedAdapter, open_packed, read_packed
from lora.host_region import HostRegion
from lora.layout import Layout
from lora.packed import PackedForm
from lora.shard import WHOLE, Shard


class SlabFiller:
    """Fills slabs of one arena. One thread may use it, except for `release`.

    All memory that copies need is pinned once, in the constructor.
    arena: [num_slabs, slab_bytes] uint8.   device: the arena's device; None if it is host memory.
    shard: the part of `form` that this arena holds.   host_bytes: bytes pinned for adapters on
    their way to a device, rounded down to whole slabs.
    """

    def __init__(
        self,
        form: PackedForm,
        arena: torch.Tensor,
        device: Device | None = None,
        shard: Shard = WHOLE,
        host_bytes: int = 0,
    ) -> None:
        self.form = form
        self.arena = arena
        self.shard = shard
        self._copies = None if device is None else _Copies(device, form.layout)
        self._region = None if device is None else _pinned_region(device, form.layout, host_bytes)

    def read(self, path: Path, digest: str) -> PackedAdapter:
        """Open a packed file, and read it to pinned memory if the arena is on a device.

        The caller releases the adapter after use.
        Raises FileNotFoundError; AdapterError("lost"); OSError; RuntimeError if memory runs out.
        """
        if self._region is None:
            return open_packed(path, digest, self.form, self.shard)
        return read_packed(path, digest, self.form, self.shard, self._region)

    def release(self, packed: PackedAdapter) -> None:
        """Give back the adapter's host memory. Any thread may call this; it does not block."""
        if self._region is not None:
            self._region.give_back(packed.region_slabs)

    def fill(self, packed: PackedAdapter, slabs: list[int]) -> DeviceTables:
        """Copy all of the adapter into these slabs; then steps may use it. Raises like `read`."""
        layout, copies = self.form.layout, self._copies
        if copies is None:
            packed.copy_to(self.arena, slabs)
            return DeviceTables.of(packed, layout, slabs, self.arena)
        packed.copy_to(self.arena, slabs, copies.begin)
        tables = DeviceTables.of(packed, layout, slabs, self.arena, copies.begin_new)
        copies.finish()
        return tables


class _Copies:
    """Copies from host memory to the device, on a stream of their own, concurrent with steps."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device = device
        self._stream = device.stream()
        # The largest tables of an adapter: an address for each tile, a scale for each place.
        num_places = math.prod(layout.table_shape)
        self._tables = device.pinned(num_places * (MAX_RANK // RANK_ROWS + 1), dtype=torch.int32)
        self._num_used = 0

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device.copy(self._stream, target, source)

    def begin_new(self, source: torch.Tensor) -> torch.Tensor:
        """Begin a copy of `source`, of four-byte values, to new device memory; returns the copy."""
        end = self._num_used + source.numel()
        pinned = self._tables[self._num_used : end].view(source.dtype).view(source.shape)
        self._num_used = end
        target = torch.empty_like(source, device=self._device.torch_device)
        self.begin(target, pinned.copy_(source))
        return target

    def finish(self) -> None:
        """Wait for all copies begun so far."""
        self._device.synchronize(self._device.record(self._stream))
        self._num_used = 0


def _pinned_region(device: Device, layout: Layout, host_bytes: int) -> HostRegion:
    num_slabs = host_bytes // layout.slab_bytes
    return HostRegion(device.pinned(num_slabs, layout.slab_bytes, dtype=torch.uint8))
