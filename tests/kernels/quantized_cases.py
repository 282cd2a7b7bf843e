"""Quantised weights of all roundings that a GPU multiplies, with every code in them."""

import torch

from kernels.quantized import QuantizedWeight, Rounding

ROUNDINGS = [
    Rounding(bits, group_size, has_zeros)
    for bits in (4, 8)
    for group_size in (32, 64, 96, 128, None)
    for has_zeros in (False, True)
]


def random_weight(
    rounding: Rounding,
    out_features: int,
    in_features: int,
    seed: int = 1,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Make a weight of random codes, scales and zeros, with outputs of about 1 for inputs of 1.

    scale_dtype: in which the scales are exact; checkpoints have float16.
    """
    rng = torch.Generator().manual_seed(seed)
    most = 1 << (rounding.bits - 1)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-most, most, shape, generator=rng).to(torch.int8)

    groups = in_features // (rounding.group_size or in_features)
    scales = (torch.rand(out_features, groups, generator=rng) + 0.5) / (most * in_features**0.5)
    zeros = codes(out_features, groups) if rounding.has_zeros else None
    scales = scales.to(scale_dtype).float()
    return QuantizedWeight(rounding, codes(out_features, in_features), scales, zeros)
