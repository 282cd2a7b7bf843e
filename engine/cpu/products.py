"""Products with several weights at once."""

from collections.abc import Sequence

import torch

from kernels.cpu.plain import CpuKernels, Linear
from kernels.quantized import Weight, concatenated, form_of


def fused(
    kernels: CpuKernels, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> Linear:
    """Make a layer whose outputs are those of all weights side by side; they share their input."""
    if len({form_of(weight) for weight in weights}) > 1:
        parts = [kernels.linear(w, b) for w, b in zip(weights, biases, strict=True)]
        return lambda x: torch.cat([part(x) for part in parts], dim=1)
    given = [bias for bias in biases if bias is not None]
    bias = torch.cat(given) if len(given) == len(biases) else None
    assert bias is not None or not given, "a family has biases on all of them, or on none"
    return kernels.linear(concatenated(weights), bias)
