"""Properties of the device that launches need, and the differences of Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, in Python and without a GPU. Their operands are cast
to float32 first, because the interpreter computes bfloat16 as integers.
"""

_INTERPRETED_PROGRAMS = 3
"""Persistent programs of a kernel in the interpreter: so few that each of them loops."""

_assumed: list[int] = []


def capability(device: torch.device) -> int:
    """The compute capability, 90 for 9.0; without a GPU the assumed one, or else 90."""
    if device.type == "cuda":
        major, minor = _capability(device)
        return 10 * major + minor
    return _assumed[-1] if _assumed else 90


@contextmanager
def assume_capability(value: int) -> Iterator[None]:
    """Make launches on tensors in host memory choose their configs as for this capability."""
    _assumed.append(value)
    try:
        yield
    finally:
        _assumed.pop()


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Number of programs of a persistent kernel that fill the device."""
    if device.type == "cuda":
        return per_multiprocessor * _num_multiprocessors(device)
    return _INTERPRETED_PROGRAMS


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
