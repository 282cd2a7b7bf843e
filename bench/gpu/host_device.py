"""The interface of `lora.device` on a CPU, where all work is done at once: for dry runs."""

from collections.abc import Callable

import torch

from lora.device import Memory

_GIB = 1 << 30


class HostDevice:
    """Streams are None: submitted work has been done when `submit` returns."""

    torch_device = torch.device("cpu")
    compute = None

    def stream(self) -> None:
        return None

    def submit(self, stream: None, work: Callable[[], None]) -> None:
        work()

    def copy(self, stream: None, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self, stream: None) -> None:
        return None

    def synchronize(self, event: None) -> None:
        pass

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def measure(self, work: Callable[[], None]) -> Memory:
        # The work is not run: there is no device memory to measure.
        return Memory(_GIB, _GIB)

    def driver_bytes(self) -> int:
        return 0
