"""A decoder on the CPU, for tests: plain torch where nothing else is asked for."""

import torch

from engine.cpu.decoder import Decoder, attention_shape
from kernels.cpu.plain import PlainKernels


def make_decoder(config, weights, form, max_model_len, make_kernels=PlainKernels):
    dtype = getattr(torch, form.dtype)
    shape = attention_shape(config, form.layout.block_size, max_model_len, dtype)
    return Decoder(config, weights, make_kernels(shape))
