"""Products with weights in 4 and 8 bits, for few tokens and for many, and in FP8."""

from collections.abc import Iterator

import torch

from engine.gpu.linear import Linears
from kernels import reference
from kernels.packed import pack
from kernels.quantized import Fp8Weight, Rounding
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Trial, near, on, randn, work_on
from tests.kernels.quantized_cases import random_weight

_ROUNDINGS = (Rounding(4, 32), Rounding(4, 128, has_zeros=True), Rounding(8), Rounding(8, 32))
_FEW = 7
_MANY = 300
"""More than tiles of tokens that scale the weights themselves."""
_FP8_INPUTS = (2048, 14336)
"""Inputs with which sums may stay in the tensor cores, and with which that would lose too much."""


def quantized_trials(setting: Setting) -> Iterator[Trial]:
    for dtype in setting.dtypes:
        for rounding in _ROUNDINGS:
            for tokens in (_FEW, setting.kernels.tokens, _MANY):
                yield _multiply(setting, rounding, tokens, dtype)
    if setting.has_fp8:
        for in_features in _FP8_INPUTS:
            yield _multiply_fp8(setting, in_features)


def _multiply(setting: Setting, rounding: Rounding, tokens: int, dtype: torch.dtype) -> Trial:
    name = f"multiply_quantized {rounding}, {tokens} tokens, {dtype}"
    rng, in_features = setting.rng(name), setting.kernels.hidden
    in_features -= in_features % (rounding.group_size or 1)
    out_features = setting.kernels.intermediate // 16 + 1  # the reference on a CPU is slow
    # float32 for one of the roundings whose scales would be float16
    scale_dtype = torch.float32 if rounding == _ROUNDINGS[-1] else torch.float16
    seed = setting.seed_of(name)
    weight = random_weight(rounding, out_features, in_features, seed, scale_dtype)
    x = randn(tokens, in_features, rng=rng, dtype=dtype)
    bias = randn(out_features, rng=rng, dtype=dtype)
    packed, wide = pack(weight), weight.dequantize().double()

    def run(ops, there):
        moved_x, moved_bias = on(there, x, bias)
        return [ops.multiply_quantized(moved_x, work_on(there, packed), moved_bias)]

    return Trial(name, run, near(lambda: [x.double() @ wide.T + bias.double()]))


def _multiply_fp8(setting: Setting, in_features: int) -> Trial:
    name, dtype = f"product in FP8 of {in_features} inputs", setting.dtype
    rng = setting.rng(name)
    # Each row's largest code is 448, so that its scale is 1 and the codes are found again.
    x = reference.quantize_fp8(randn(setting.kernels.tokens, in_features, rng=rng))[0].to(dtype)
    codes, scales = reference.quantize_fp8(randn(48, in_features, rng=rng) / in_features**0.5)
    scales /= 448  # so that float16 holds the results

    def run(ops, there):
        if ops is reference:  # not every torch has this product on a CPU
            return [(x.float() @ (codes.float() * scales).T).to(dtype)]
        (moved,) = on(there, x)
        return [Linears(there, dtype, ops).make(Fp8Weight(codes, scales).to(there))(moved)]

    return Trial(name, run, near(lambda: [x.double() @ (codes.double() * scales.double()).T]))
