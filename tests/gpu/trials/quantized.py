"""Products with weights in 4 and 8 bits, for few tokens and for many, and in FP8."""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from engine.gpu.linear import Linears
from kernels import reference
from kernels.packed import pack
from kernels.quantized import Fp8Weight, Rounding
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Outputs, Trial, alike, apart, near, on, randn, work_on
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
                yield multiply(setting, rounding, tokens, dtype)
    yield _bad_rows(setting)
    if setting.has_fp8:
        for in_features in _FP8_INPUTS:
            yield _multiply_fp8(setting, in_features)


def multiply(
    setting: Setting,
    rounding: Rounding,
    tokens: int,
    dtype: torch.dtype,
    shape: tuple[int, int] | None = None,
) -> Trial:
    """A product with a weight of this shape, [out, in], else of about the setting's sizes."""
    name = f"multiply_quantized {rounding} {shape or ''}, {tokens} tokens, {dtype}"
    # float32 for one of the roundings whose scales would be float16
    is_wide = dtype == torch.float32 or rounding == _ROUNDINGS[-1]
    scale_dtype = torch.float32 if is_wide else torch.float16
    shape, rng = shape or shape_of(setting, rounding), setting.rng(name)
    weight = random_weight(rounding, *shape, setting.seed_of(name), scale_dtype)
    x = randn(tokens, shape[1], rng=rng, dtype=dtype)
    bias = randn(shape[0], rng=rng, dtype=dtype)
    packed, wide = pack(weight), weight.dequantize().double()

    def run(ops, there):
        (moved_x,), (moved_bias,) = apart(there, x), on(there, bias)
        return [ops.multiply_quantized(moved_x, work_on(there, packed), moved_bias)]

    # The reference itself loses no more than torch with these weights.
    judge, dense = near(lambda: [x.double() @ wide.T + bias.double()]), wide.to(dtype)

    def judge_both(ours: Outputs, torchs: Outputs) -> None:
        judge(ours, torchs)
        judge(torchs, [linear(x, dense, bias)])

    return Trial(name, run, judge_both)


def shape_of(setting: Setting, rounding: Rounding) -> tuple[int, int]:
    """(out, in) of a weight with few outputs, as the reference on a CPU is slow."""
    hidden, group = setting.kernels.hidden, rounding.group_size or 1
    return setting.kernels.intermediate // 16 + 1, hidden - hidden % group


def _bad_rows(setting: Setting) -> Trial:
    """Rows that are not finite spoil no others."""
    name, rounding = "multiply_quantized beside bad rows", Rounding(8)
    weight = pack(random_weight(rounding, *shape_of(setting, rounding), setting.seed_of(name)))
    x = randn(5, weight.in_features, rng=setting.rng(name), dtype=setting.dtype)
    bad = x.clone()
    bad[1, 3], bad[3, 8] = torch.nan, torch.inf

    def run(ops, there):
        own, inputs = work_on(there, weight), on(there, x, bad)
        clean, spoilt = (ops.multiply_quantized(part, own) for part in inputs)
        return [clean[::2], spoilt[::2], spoilt[1], spoilt[3]]

    def judge(ours: Outputs, _: Outputs) -> None:
        alike(ours[:2], _)
        assert ours[2].isnan().all()
        assert not ours[3].isfinite().any()

    return Trial(name, run, judge)


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
