"""The kernels that an engine on a CPU would take, for decoders of tests."""

import pytest

from engine.cpu.choice import MAKERS
from kernels.cpu.errors import Unavailable
from kernels.cpu.linear import FLOAT32, INT8, LinearMaker
from tests.engine.gpu.backends import make_config


def kernels_of(kind, **values):
    """A maker of the kernels that an engine takes as `cpu_kernels`, for `make_decoder`.

    values: of EngineConfig.   The test is skipped where they cannot be had.
    """
    config = make_config(cpu_kernels=kind, device="cpu", **values)
    libraries = INT8 if config.quantization == "int8" else FLOAT32
    linears = LinearMaker(libraries, is_invariant=config.batch_invariant)

    def make(shape):
        try:
            return MAKERS[kind](config, shape, linears)
        except Unavailable as reason:
            pytest.skip(f"{kind}: {reason}")

    return make
