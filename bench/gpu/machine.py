"""The machine that is measured, and its clock: a GPU, or a CPU with tiny sizes for dry runs."""

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch

from bench.gpu.host_device import HostDevice
from bench.report import describe_machine
from lora.device import CudaDevice, Device
from lora.layout import ModelShape

Work = Callable[[], object]
T = TypeVar("T")

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
_TINY = ModelShape(1, 64, 160, 4, 2, 16)
_WARM_UP, _REPLAYS = 3, 30
_POISONED_FLOATS = ((2, 32 << 20), (64, 128 << 10))
"""(count, size): the allocator has separate pools for large and for small pieces of memory."""


class Machine(ABC):
    """The device that is measured, with the sizes of its measurements.

    rotated_bytes: least amount of data that a measurement goes through, so that no cache holds
    it.
    """

    dtype: torch.dtype
    shape: ModelShape
    vocab_size: int
    rotated_bytes: int

    @cached_property
    @abstractmethod
    def device(self) -> Device:
        """Device that all kernels are measured on."""

    @abstractmethod
    def new_device(self) -> Device:
        """Make another device, for an engine: its graphs share memory, and end together."""

    @abstractmethod
    def seconds(self, work: Work) -> float:
        """Return the median seconds of a run of `work`, replayed as a graph."""

    @abstractmethod
    def pick(self, full: T, dry: T) -> T:
        """Return `full` on a GPU, and `dry` on a dry run."""

    @abstractmethod
    def free_memory(self) -> None:
        """Return unused memory to the device."""

    @abstractmethod
    def is_sound(self) -> bool:
        """Whether the device still answers; after an illegal access it does not."""

    @property
    @abstractmethod
    def memory_bytes(self) -> tuple[int, int]:
        """Memory (free, total) of the device."""

    @property
    def there(self) -> torch.device:
        return self.device.torch_device

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def randn(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Random numbers on the device, in the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.there).normal_(std=std)

    def copies(self, size_bytes: int) -> int:
        """Number of pieces of `size_bytes` that no cache holds together."""
        return max(1, -(-self.rotated_bytes // size_bytes))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` once in memory that was filled with NaN, and wait for its result."""
        results: list[T] = []
        device = self.device

        def run() -> None:
            self._poison()
            results.append(work())

        device.submit(device.compute, run)
        device.synchronize(device.record(device.compute))
        return results.pop()

    def _poison(self) -> None:
        """Fill memory with NaN and free it: allocations that reuse it hold NaN."""
        for count, size in self.pick(_POISONED_FLOATS, ((1, 1 << 16),)):
            [torch.full((size,), torch.nan, device=self.there) for _ in range(count)]


class Gpu(Machine):
    """The first CUDA device."""

    dtype = torch.bfloat16
    shape, vocab_size = LLAMA_8B, 128256
    rotated_bytes = 256 << 20

    def __init__(self) -> None:
        torch.cuda.set_device(0)

    @cached_property
    def device(self) -> Device:
        return self.new_device()

    def new_device(self) -> Device:
        device = CudaDevice(torch.device("cuda", 0))
        # Tensors are made on the compute stream, so that kernels read them when they are complete.
        torch.cuda.set_stream(device.compute)
        return device

    def seconds(self, work: Work) -> float:
        self.run(work)  # the first launch compiles, which cannot be captured
        compute = self.device.compute
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=compute, capture_error_mode="thread_local"):
            work()
        with torch.cuda.stream(compute):
            for _ in range(_WARM_UP):
                graph.replay()
            events = [compute.record_event(torch.cuda.Event(enable_timing=True))]
            for _ in range(_REPLAYS):
                graph.replay()
                events.append(compute.record_event(torch.cuda.Event(enable_timing=True)))
        events[-1].synchronize()
        pairs = zip(events[:-1], events[1:], strict=True)
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000

    def pick(self, full: T, dry: T) -> T:
        return full

    def free_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def is_sound(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    @property
    def memory_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(0)


def dry_name() -> str:
    """Return the name of the device in rows of a dry run."""
    return f"{describe_machine()}, dry run"


class DryRun(Machine):
    """A CPU and Triton's interpreter: the same code, whose figures mean nothing."""

    dtype = torch.float16
    shape, vocab_size = _TINY, 320
    rotated_bytes = 1

    @cached_property
    def device(self) -> Device:
        return HostDevice()

    def new_device(self) -> Device:
        return HostDevice()

    def seconds(self, work: Work) -> float:
        start = time.perf_counter()
        self.device.submit(self.device.compute, work)
        return time.perf_counter() - start

    def pick(self, full: T, dry: T) -> T:
        return dry

    def free_memory(self) -> None:
        pass

    def is_sound(self) -> bool:
        return True

    @property
    def memory_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30
