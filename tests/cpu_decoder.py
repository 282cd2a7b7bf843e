"""A decoder on the CPU, for tests; its kernels are plain torch by default."""

import torch

from engine.cpu.decoder import Decoder, attention_shape
from engine.models.rounding import WeightRounding
from kernels.cpu.plain import CpuKernels


def make_decoder(
    config, weights, form, max_model_len, make_kernels=CpuKernels, ranks=None, quantization=None
):
    """Make a decoder. ranks: the ranks that share the model, if any; `weights` are then this rank's
    parts, and `form` has as many shards.   quantization: see EngineConfig.
    """
    dtype = getattr(torch, form.dtype)
    own = config.shard(form.layout.num_shards)
    shape = attention_shape(own, form.layout.block_size, max_model_len, dtype)
    rounding = WeightRounding.of(quantization)
    return Decoder(config, weights, make_kernels(shape), ranks, form.layout, rounding)
