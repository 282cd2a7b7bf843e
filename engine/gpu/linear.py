"""Projections of the base model on a device: dense, with weights in FP8, or in 4 or 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.gpu.kernels import Kernels
from kernels.packed import PackedWeight, can_pack, pack
from kernels.quantized import Fp8Weight, QuantizedWeight, Weight, concatenated, form_of
from kernels.stacked import DeviceWeight

Quantization = Literal["fp8"]
_FP8_MULTIPLE = 16
"""Number of which both widths of an FP8 product are multiples, as tensor cores require."""

_MOST_FAST_INPUTS = 2048
"""Most inputs of an FP8 product that a Hopper may sum in its tensor cores alone. These keep 13 bits
of fraction and cut off the rest, 32 inputs at a time (DeepSeek-V3, arXiv 2412.19437, sec. 3.5.2).
By emulation that and bfloat16 lose up to 1.55 times what bfloat16 alone loses with 2,048 inputs,
2.1 times with 3,072 and 2.7 times with 8,192 (bench/LOG.md); kernels may lose twice as much.
"""

LEAST_FP8_CAPABILITY = 89
"""Least compute capability, 89 for 8.9, of GPUs that multiply e4m3."""


class Linear(Protocol):
    """Computes x @ weight.T + bias.   x: [T, in].   Result: [T, out] in x's dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """A projection in the model's dtype. weight: [out, in].   bias: [out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Fp8Linear:
    """A projection with e4m3 weights and a float32 scale for each output. Inputs are quantised
    token by token, so that no token depends on its neighbours. The product is torch's `_scaled_mm`.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.weight, self.scale = weight.codes, weight.scales.T.contiguous()
        self.bias, self.kernels = bias, kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scale = self.kernels.quantize_fp8(x)
        return torch._scaled_mm(
            values,
            self.weight.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=may_sum_fast(x.shape[1], x.dtype),
        )


def may_sum_fast(in_features: int, dtype: torch.dtype) -> bool:
    """Whether sums of an FP8 product in tensor cores alone are exact enough for results in dtype.

    float16 is not: it loses an eighth of what bfloat16 loses.
    """
    return dtype == torch.bfloat16 and in_features <= _MOST_FAST_INPUTS


class QuantizedLinear:
    """A projection with weights in 4 or 8 bits; inputs and products are in the model's dtype."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.weight, self.bias, self.kernels = weight, bias, kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.multiply_quantized(x, self.weight, self.bias)


class SideBySide:
    """Projections of one input with weights of different forms, as one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


@dataclass(frozen=True, slots=True)
class Linears:
    """Makes projections on a device, in the form that their weights have.

    dtype: the model's.   quantization: the form into which `fuse` rounds weights in that dtype.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    quantization: Quantization | None = None

    def fuse(self, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> Linear:
        """Fuse projections of one input into one, with their outputs side by side.

        Adjacent weights of one form share a product. Raises UnsupportedModel if the weights are to
        be rounded to FP8, and no product takes their widths, as may happen with a rank's part.
        """
        pairs = zip(weights, biases, strict=True)
        groups = (
            zip(*group, strict=True) for _, group in groupby(pairs, lambda pair: form_of(pair[0]))
        )
        parts = [self._fuse_alike(*group) for group in groups]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def make(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Make one projection. A weight in a form that this device cannot multiply is dequantised.

        weight, bias: on the device.
        """
        return self._linear(self._in_form(weight), bias)

    def place(self, weights: Sequence[Weight]) -> DeviceWeight:
        """Put the outputs of weights of one form side by side on the device.

        Raises UnsupportedModel as `fuse` does.
        """
        weight = concatenated([weight.to(self.device) for weight in weights])
        if self.quantization == "fp8" and isinstance(weight, torch.Tensor):
            weight = self._round_to_fp8(weight)
        return self._in_form(weight)

    def _linear(self, weight: DeviceWeight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, PackedWeight):
            return QuantizedLinear(weight, bias, self.kernels)
        if isinstance(weight, Fp8Weight):
            return Fp8Linear(weight, bias, self.kernels)
        return DenseLinear(weight, bias)

    def _in_form(self, weight: Weight) -> DeviceWeight:
        """A weight as products take it; in a form that this device cannot multiply, dequantised."""
        if isinstance(weight, QuantizedWeight) and can_pack(weight.rounding):
            return pack(weight)
        if isinstance(weight, Fp8Weight) and _fits_fp8(weight) and _has_fp8(self.device):
            return weight
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize().to(self.dtype)

    def _fuse_alike(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
    ) -> Linear:
        """Fuse projections whose weights have the same form."""
        bias = None
        if any(given is not None for given in biases):
            bias = torch.cat(
                [
                    torch.zeros(part.shape[0], dtype=self.dtype, device=self.device)
                    if given is None
                    else given.to(self.device)
                    for part, given in zip(weights, biases, strict=True)
                ]
            )
        return self._linear(self.place(weights), bias)

    def _round_to_fp8(self, weight: torch.Tensor) -> Fp8Weight:
        if not _fits_fp8(weight):
            out_dim, in_dim = weight.shape
            raise UnsupportedModel(
                f"FP8 weights want widths that {_FP8_MULTIPLE} divides, here is a product of "
                f"{in_dim} to {out_dim}: leave out quantization, or take a smaller "
                "tensor_parallel_size"
            )
        return Fp8Weight(*self.kernels.quantize_fp8(weight))


def _fits_fp8(weight: torch.Tensor | Fp8Weight) -> bool:
    return not any(width % _FP8_MULTIPLE for width in weight.shape)


def _has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3; torch does so on a CPU, too."""
    if device.type != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= LEAST_FP8_CAPABILITY
