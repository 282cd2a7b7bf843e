"""Streams of work on a device; the interface states which work is ordered and which is not.

Work that is submitted to one stream runs in the order of submission. Streams are ordered by events
only, and the host knows that work is done once it has waited for an event recorded behind it. All
work that steps and loaders give a GPU goes through here, so that tests can run it late, in any
allowed order, and find pairs of accesses that nothing orders.
"""

import gc
import math
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Stream = Any
Event = Any
"""Streams and events are opaque: each device has its own types."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """A device that runs work on streams.

    compute: the stream of steps.   torch_device: where the device's tensors live.
    """

    torch_device: torch.device
    compute: Stream

    def stream(self) -> Stream:
        """Make a new stream."""

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Run `work` after everything that this stream was given before; returns at once."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Submit a copy. A side in host memory is pinned, and untouched until a later event."""

    def record(self, stream: Stream) -> Event:
        """Make an event that happens when all work submitted to the stream so far is done."""

    def synchronize(self, event: Event) -> None:
        """Block the host until the event has happened."""

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` concurrently with the submitted work that calls this.

        Returns a function that makes the submitted work wait for `work`.
        """

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, by running it, as one launch that can be submitted any number of times.

        Every launch reads and writes the same memory; only the numbers in it may differ.
        """

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that copies can read and write while the host goes on.

        Only called at the start: pinning takes long, and may hold up running work.
        """

    def measure(self, work: Callable[[], None]) -> Memory:
        """Run `work` and return the memory that is left at its peak.

        Graphs captured by `work` must not be used afterwards. Memory that the driver keeps for
        graphs is not accounted for.
        """

    def driver_bytes(self) -> int:
        """Bytes of the device's memory that are in use now for anything but tensors."""


class CudaDevice:
    """A CUDA device. One thread submits steps; loader threads use their own streams."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.compute = self.stream()
        self._side = self.stream()
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def submit(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            work()

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = stream.record_event()
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        here = torch.cuda.current_stream(self.torch_device)
        self._side.wait_stream(here)
        self.submit(self._side, work)
        return lambda: here.wait_stream(self._side)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        # The first run is not captured: compilation and setup at a first launch cannot be.
        self.submit(self.compute, work)
        self.compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        # By default CUDA ends a capture when any thread of the process allocates or synchronizes,
        # as a loader's may, which pins memory and waits for its copies.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self.compute, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # torch's pin_memory is unsuitable: it rounds up to powers of two and keeps freed memory.
        cudart = torch.cuda.cudart()

        def register(address: int, num_bytes: int) -> None:
            torch.cuda.check_error(cudart.cudaHostRegister(address, num_bytes, 0))

        try:
            return page_locked(shape, dtype, register, cudart.cudaHostUnregister)
        except RuntimeError as error:
            raise RuntimeError(
                f"host memory of {math.prod(shape) * dtype.itemsize} bytes cannot be pinned "
                f"({error}): take a smaller host_cache_bytes or swap_bytes"
            ) from error

    def measure(self, work: Callable[[], None]) -> Memory:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        gc.collect()  # graphs may lie in cycles
        # A pool may be shared only while one of its graphs lives, so a new pool is needed.
        self._pool = torch.cuda.graph_pool_handle()
        peak = torch.cuda.max_memory_reserved(self.torch_device)
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(free - (peak - kept), total)

    def driver_bytes(self) -> int:
        self.compute.synchronize()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - torch.cuda.memory_reserved(self.torch_device)


def page_locked(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    register: Callable[[int, int], None],
    unregister: Callable[[int], object],
) -> torch.Tensor:
    """Allocate page-aligned host memory that stays registered until its last view is gone.

    register: takes the address and the number of bytes.   unregister: takes the address.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    whole = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    address = whole.ctypes.data + start
    # Its storage begins at the address: torch asks there whether a copy in a capture is pinned.
    tensor = torch.from_numpy(whole[start : start + num_bytes])
    if num_bytes:
        register(address, num_bytes)
        # Steps may still be copying at exit, so the memory stays registered until the process ends.
        weakref.finalize(whole, unregister, address).atexit = False
    return tensor.view(dtype).view(shape)
