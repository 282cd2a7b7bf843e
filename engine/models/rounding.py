"""The rounding of a checkpoint's floating-point weights by the setting `quantization`."""

from dataclasses import dataclass
from typing import Self

import torch

from kernels.quantized import Rounding, Weight, quantize

_INT8, _INT4 = Rounding(8), Rounding(4, group_size=32)


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """How projections and the head are rounded; None leaves them as they are.

    With int4 the head has 8 bits, since an error of a logit reaches the answer undamped, and so has
    a projection whose inputs the groups do not divide.
    """

    projections: Rounding | None = None
    head: Rounding | None = None

    @classmethod
    def of(cls, quantization: str | None) -> Self:
        """The rounding of a setting; FP8 is rounded on the device."""
        if quantization == "int8":
            return cls(_INT8, _INT8)
        return cls(_INT4, _INT8) if quantization == "int4" else cls()


NO_ROUNDING = WeightRounding()


def rounded(weight: Weight, rounding: Rounding | None) -> Weight:
    """Round a weight, if it is to be rounded and the checkpoint has no codes of it."""
    if rounding is None or not isinstance(weight, torch.Tensor):
        return weight
    return quantize(weight, rounding)
