"""What an engine computes on: the arena's memory, and a runner for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.core import Runner
from engine.meter import TokenMeter
from engine.segments import Tables
from lora.device import Device


class MeasuredRunner(Runner, Protocol):
    """copy_bytes_per_s: between arena and swap space; 0 where there is none."""

    copy_bytes_per_s: float


@dataclass(frozen=True)
class Backend:
    """slabs: the arena, [slabs, slab_bytes] uint8.   device: None where they are host memory.

    make_runner: from the adapters' tables, a meter and the number of swap slots.
    """

    slabs: torch.Tensor
    device: Device | None
    weight_bytes: int
    make_runner: Callable[[Tables, TokenMeter, int], MeasuredRunner]
