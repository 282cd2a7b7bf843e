"""A decoder on the CPU, for tests: plain torch where nothing else is asked for."""

import pytest
import torch

from engine.cpu.choice import MAKERS
from engine.cpu.decoder import Decoder, attention_shape
from kernels.cpu.errors import Unavailable
from kernels.cpu.linear import FLOAT32, INT8, LinearMaker
from kernels.cpu.plain import PlainKernels
from tests.engine.gpu.backends import make_config


def make_decoder(config, weights, form, max_model_len, make_kernels=PlainKernels):
    dtype = getattr(torch, form.dtype)
    shape = attention_shape(config, form.layout.block_size, max_model_len, dtype)
    return Decoder(config, weights, make_kernels(shape))


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
