"""Packed adapters into slabs of a rank's arena: from the file, or from pinned memory by copies."""

from pathlib import Path

import torch

from lora.batch import DeviceTables
from lora.device import Device
from lora.host import PackedAdapter, open_packed, read_packed
from lora.packed import PackedForm
from lora.shard import WHOLE, Shard


class SlabFiller:
    """For one thread.

    arena: [num_slabs, slab_bytes] uint8.   device: that it is on; None where it is host memory.
    shard: of `form`, that lies in this arena.
    """

    def __init__(
        self,
        form: PackedForm,
        arena: torch.Tensor,
        device: Device | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.form = form
        self.arena = arena
        self.shard = shard
        self._copies = None if device is None else _Copies(device)

    def read(self, path: Path, digest: str) -> PackedAdapter:
        """Into host memory, where the arena is somewhere else.

        Raises FileNotFoundError; AdapterError("lost"); OSError, and RuntimeError for no memory.
        """
        if self._copies is not None:
            return read_packed(path, digest, self.form, self._copies.device.pinned, self.shard)
        return open_packed(path, digest, self.form, self.shard)

    def fill(self, packed: PackedAdapter, slabs: list[int]) -> DeviceTables:
        """The adapter in these slabs, all of it: steps may use it from now on. Raises as `read`."""
        layout, copies = self.form.layout, self._copies
        if copies is None:
            packed.copy_to(self.arena, slabs)
            return DeviceTables.of(packed, layout, slabs, self.arena)
        packed.copy_to(self.arena, slabs, copies.begin)
        tables = DeviceTables.of(packed, layout, slabs, self.arena, copies.begin_new)
        copies.finish()
        return tables


class _Copies:
    """From host memory to the device, on a stream of their own beside the steps."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.stream()
        self._sources: list[torch.Tensor] = []

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.device.copy(self._stream, target, source)

    def begin_new(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source` in device memory of its own."""
        pinned = self.device.pinned(*source.shape, dtype=source.dtype).copy_(source)
        target = torch.empty_like(source, device=self.device.torch_device)
        self._sources.append(pinned)
        self.begin(target, pinned)
        return target

    def finish(self) -> None:
        """Wait for all of them."""
        self.device.synchronize(self.device.record(self._stream))
        self._sources.clear()
