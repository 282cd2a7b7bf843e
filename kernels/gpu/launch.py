"""What a launch has to know of the device, and what differs in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Python, without a GPU. Operands are cast to float32 first: the interpreter
computes bfloat16 as integers.
"""

_INTERPRETED_PROGRAMS = 3
"""As few persistent programs as make each of them loop."""

_assumed: list[int] = []


def capability(device: torch.device) -> int:
    """The compute capability, 90 for 9.0; without a GPU the assumed one."""
    if device.type == "cuda":
        major, minor = _capability(device)
        return 10 * major + minor
    return _assumed[-1] if _assumed else 90


@contextmanager
def assume_capability(value: int) -> Iterator[None]:
    """Launches on tensors in host memory choose their configs as on such a device."""
    _assumed.append(value)
    try:
        yield
    finally:
        _assumed.pop()


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Of a persistent kernel, enough to fill the device."""
    if device.type == "cuda":
        return per_multiprocessor * _num_multiprocessors(device)
    return _INTERPRETED_PROGRAMS


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
