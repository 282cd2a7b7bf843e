"""Streams of work on a device: the seam between what is ordered and what only happens to be.

What is submitted to one stream runs in that order. Streams are ordered by events only, and the host
knows that something has happened when it has waited for an event behind it. Everything that steps
and loaders give a GPU goes through here, so that tests can run it late, in any order that is
allowed, and find two accesses that nothing orders.
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
"""Each device has its own kind of both, and nobody else looks into them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a device."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """compute: the stream of steps.   torch_device: where tensors on it live."""

    torch_device: torch.device
    compute: Stream

    def stream(self) -> Stream:
        """One more stream."""

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Run `work` after everything that this stream was given before; returns at once."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """As submit. What is in host memory is pinned, and left alone until an event behind it."""

    def record(self, stream: Stream) -> Event:
        """Happens when everything that the stream was given until now has been done."""

    def synchronize(self, event: Event) -> None:
        """The host waits for the event."""

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Inside of submitted work: run this beside what follows; the answer waits for it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as one launch, to be submitted any number of times; it is run to learn it.

        It reads and writes the same memory every time, and only numbers in memory may differ.
        """

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies can read and write while the host goes on.

        For the start only: pinning takes long, and may hold up what runs.
        """

    def measure(self, work: Callable[[], None]) -> Memory:
        """Do `work`; how much would be left while it takes the most. Its graphs are used no more.

        What the driver keeps for graphs is not in it.
        """

    def driver_bytes(self) -> int:
        """Bytes of the device's memory that are in use now, and not for tensors."""


class CudaDevice:
    """A CUDA device. Steps come from one thread, loaders use streams of their own from theirs."""

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
        # Once for real: what is compiled or set up at the first launch cannot be captured.
        self.submit(self.compute, work)
        self.compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.compute):
            work()
        return graph.replay

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # Not torch's pin_memory: its allocator rounds up to powers of two, and keeps what is freed.
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
        # A pool may be shared only while a graph of it lives.
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
    """Fresh host memory from a page's start on, registered until the last view of it is gone.

    register: takes address and bytes.   unregister: takes the address.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    whole = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    address = whole.ctypes.data + start
    if num_bytes:
        register(address, num_bytes)
        # At exit, steps may still be copying: the process ends with it.
        weakref.finalize(whole, unregister, address).atexit = False
    return torch.from_numpy(whole)[start : start + num_bytes].view(dtype).view(shape)
