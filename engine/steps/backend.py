"""Backends, on which an engine computes: the arena's memory, and a runner for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.steps.meter import TokenMeter
from engine.steps.runner import Runner
from engine.steps.segments import Tables
from lora.device import Device


@dataclass(frozen=True)
class Backend:
    """A device, or a CPU, with the model loaded.

    slabs: the arena, [slabs, slab_bytes] uint8.   device: None if the slabs are host memory.
    make_runner: makes a runner from the adapters' tables, a meter and the number of swap slots.
    rounds_rows_of: see CpuKernels.
    most_choices: rows and drafts that a step has memory for; None if it makes its own.
    """

    slabs: torch.Tensor
    device: Device | None
    weight_bytes: int
    make_runner: Callable[[Tables, TokenMeter, int], Runner]
    rounds_rows_of: Sequence[int] = ()
    most_choices: int | None = None
