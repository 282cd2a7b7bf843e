"""The kernels that an engine on a CPU would choose, for decoders in tests."""

import pytest

from engine.cpu.choice import MAKERS
from kernels.cpu.errors import Unavailable
from kernels.cpu.linear import LinearMaker
from tests.engine.gpu.backends import make_config


def kernels_of(kind, **values):
    """A maker of the kernels that an engine takes as `cpu_kernels`, for `make_decoder`.

    values: fields of EngineConfig.   The test is skipped where the kernels are not available.
    """
    config = make_config(cpu_kernels=kind, device="cpu", **values)
    linears = LinearMaker(is_invariant=config.batch_invariant)

    def make(shape):
        try:
            return MAKERS[kind](config, shape, linears)
        except Unavailable as reason:
            pytest.skip(f"{kind}: {reason}")

    return make
