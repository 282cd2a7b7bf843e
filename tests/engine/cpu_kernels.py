"""The kernels that an engine on a CPU would choose, for decoders in tests."""

import pytest

from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.plain import CpuKernels


def kernels_of(kind, threads=1):
    """A maker of the kernels that an engine takes as `cpu_kernels`, for `make_decoder`.

    The test is skipped where the kernels are not available.
    """

    def make(shape):
        try:
            return CpuKernels(shape) if kind == "torch" else NativeKernels(shape, threads)
        except Unavailable as reason:
            pytest.skip(f"{kind}: {reason}")

    return make
