"""Products with weights in 4 and 8 bits, for few tokens and for many."""

from collections.abc import Iterator

import torch

from kernels.packed import pack
from kernels.quantized import Rounding
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Trial, near, on, randn, work_on
from tests.kernels.quantized_cases import random_weight

_ROUNDINGS = (Rounding(4, 32), Rounding(4, 128, has_zeros=True), Rounding(8), Rounding(8, 32))
_FEW = 7
_MANY = 300
"""More than tiles of tokens that scale the weights themselves."""


def quantized_trials(setting: Setting) -> Iterator[Trial]:
    for dtype in setting.dtypes:
        for rounding in _ROUNDINGS:
            for tokens in (_FEW, setting.kernels.tokens, _MANY):
                yield _multiply(setting, rounding, tokens, dtype)


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
