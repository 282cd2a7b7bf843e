"""Launches of kernels: what they need to know of the device, how many programs of a persistent
kernel it holds, and the differences of Triton's interpreter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, in Python and without a GPU. Their operands are cast
to float32 first, because the interpreter computes bfloat16 as integers.
"""

_INTERPRETED_PROGRAMS = 3
"""Persistent programs of a kernel in the interpreter: so few that each of them loops."""

_WARP_THREADS = 32
_PARTITIONS = 4
_PARTITION_REGISTERS = 1 << 14
"""A multiprocessor has four partitions with registers of their own. A warp is in one of them."""
_TENSOR_COLUMNS = 512


class _Limits(NamedTuple):
    """Most programs, warps and shared memory of a multiprocessor. A program takes 1 KiB of shared
    memory more than it asks for.
    """

    programs: int
    warps: int
    shared_kib: int


_LIMITS = {
    75: _Limits(16, 32, 64),
    80: _Limits(32, 64, 164), 86: _Limits(16, 48, 100), 87: _Limits(16, 48, 164),
    89: _Limits(24, 48, 100), 90: _Limits(32, 64, 228),
    100: _Limits(32, 64, 228), 110: _Limits(24, 48, 228), 120: _Limits(24, 48, 100),
}  # fmt: skip
"""Limits by compute capability: CUDA C++ Programming Guide, technical specifications. A capability
that is not here has the limits of the next lower one.
"""

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


def persistent(kernel: Any, *args: Any, **constants: Any) -> None:
    """Launch a kernel whose programs loop over its items, with as many as the device holds at once:
    the last ones of more would start when all others have ended.

    args: those that are no constants.   constants: those of the kernel, and Triton's options.
    """
    if INTERPRETED:
        kernel[(_INTERPRETED_PROGRAMS,)](*args, **constants)
        return
    # The arguments decide which specialisation is launched, and each has its own registers.
    compiled = kernel.run(*args, grid=None, warmup=True, **constants)
    programs, multiprocessors = _num_programs(compiled)
    compiled[(programs * multiprocessors, 1, 1)](
        *args, *(constants[name] for name in kernel.arg_names[len(args) :])
    )


def resident_programs(
    arch: int, num_warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0
) -> int:
    """Number of programs of a compiled kernel that a multiprocessor holds at once, at least 1.

    registers: of a thread; a warp gets a multiple of 256.   shared_bytes: of a program, which gets
    a multiple of 128 and 1 KiB for itself.   tensor_columns: of tensor memory, since sm_100.
    """
    limits = _LIMITS[max(known for known in _LIMITS if known <= arch)]
    warp_registers = -(-registers * _WARP_THREADS // 256) * 256
    warps = min(limits.warps, _PARTITIONS * (_PARTITION_REGISTERS // max(warp_registers, 256)))
    shared = 1024 + -(-shared_bytes // 128) * 128
    held = min(limits.programs, warps // num_warps, limits.shared_kib * 1024 // shared)
    if tensor_columns:
        held = min(held, _TENSOR_COLUMNS // tensor_columns)
    return max(held, 1)


@cache
def _num_programs(kernel: CompiledKernel) -> tuple[int, int]:
    """(programs that a multiprocessor holds, multiprocessors) of the device it is compiled for."""
    kernel._init_handles()  # loads it, after which its registers are known
    metadata = kernel.metadata
    programs = resident_programs(
        metadata.target.arch,
        metadata.num_warps,
        kernel.n_regs,
        metadata.shared,
        getattr(metadata, "tmem_size", None) or 0,
    )
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return programs, properties["multiprocessor_count"]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
