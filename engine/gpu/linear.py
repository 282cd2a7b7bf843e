"""Projections of the base model on a device: in the model's dtype, or with weights in FP8."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.gpu.kernels import Kernels

Quantization = Literal["fp8"]
_FP8_MULTIPLE = 16
"""Number of which both widths of an FP8 product are multiples, as tensor cores require."""


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

    Raises UnsupportedModel if it cannot multiply these widths, as may happen with a rank's part.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        out_dim, in_dim = weight.shape
        if out_dim % _FP8_MULTIPLE or in_dim % _FP8_MULTIPLE:
            raise UnsupportedModel(
                f"FP8 weights want widths that {_FP8_MULTIPLE} divides, here is a product of "
                f"{in_dim} to {out_dim}: leave out quantization, or take a smaller "
                "tensor_parallel_size"
            )
        self.weight, scale = kernels.quantize_fp8(weight)
        self.scale, self.bias, self.kernels = scale.T.contiguous(), bias, kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scale = self.kernels.quantize_fp8(x)
        return torch._scaled_mm(
            values,
            self.weight.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=x.dtype,
        )


def fuse(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    device: torch.device,
    quantization: Quantization | None,
    kernels: Kernels,
) -> Linear:
    """Fuse projections of one input into one on `device`, with their outputs side by side."""
    weight = torch.cat([weight.to(device) for weight in weights])
    bias = None
    if any(given is not None for given in biases):
        bias = torch.cat(
            [
                weight.new_zeros(len(part)) if given is None else given.to(device)
                for part, given in zip(weights, biases, strict=True)
            ]
        )
    if quantization is None:
        return DenseLinear(weight, bias)
    return Fp8Linear(weight, bias, kernels)
