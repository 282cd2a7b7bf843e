"""Weights of a layer's experts in one piece of memory, from which a kernel takes those it needs."""

from dataclasses import dataclass

import torch

from kernels.packed import PackedWeight, by_group
from kernels.quantized import Fp8Weight, Rounding

DeviceWeight = torch.Tensor | PackedWeight | Fp8Weight
"""A weight in a form that a GPU's products take: [out, in] in the model's dtype, or codes."""


@dataclass(slots=True, eq=False)
class ExpertStack:
    """One weight of every expert, [out, in] each. All have the same form, with experts first.

    codes: [experts, out, in] in the model's dtype or e4m3; else see PackedWeight.
    scales, zeros: [experts, ..], see Fp8Weight and PackedWeight; None where the form has none. They
    are float32 if those of one of the packed weights are.
    rounding: that of a PackedWeight; None for other forms.
    """

    in_features: int
    out_features: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    rounding: Rounding | None = None

    @classmethod
    def empty(cls, first: DeviceWeight, count: int) -> "ExpertStack":
        """A stack with room for `count` weights that are like the first one."""
        codes, scales, zeros = (
            None if part is None else part.new_empty((count, *part.shape)) for part in _parts(first)
        )
        assert codes is not None
        if isinstance(first, PackedWeight):
            sizes = first.in_features, first.out_features
            return cls(*sizes, codes, scales, zeros, first.rounding)
        return cls(first.shape[1], first.shape[0], codes, scales)

    def put(self, expert: int, weight: DeviceWeight) -> None:
        """Copy an expert's weight to its place.   weight: like the first one, see `is_like`."""
        codes, scales, zeros = _parts(weight)
        self.codes[expert] = codes
        if self.zeros is not None and zeros is not None:
            self.zeros[expert] = zeros
        if self.scales is None or scales is None:
            return
        if self.scales.dtype != scales.dtype:
            self.scales, scales = by_group(self.scales), by_group(scales)
        num_groups = min(self.scales.shape[1], len(scales))
        self.scales[expert, :num_groups] = scales[:num_groups]

    def is_like(self, weight: DeviceWeight) -> bool:
        """Whether a weight has the form and the size of those in the stack."""
        rounding = weight.rounding if isinstance(weight, PackedWeight) else None
        codes = _parts(weight)[0]
        return (rounding, codes.dtype, codes.shape) == (
            self.rounding, self.codes.dtype, self.codes.shape[1:]
        )  # fmt: skip

    def dequantize(self, expert: int) -> torch.Tensor:
        """An expert's weight as it is meant, [out, in] float32."""
        codes = self.codes[expert]
        if self.scales is None:
            return codes.float()
        scales = self.scales[expert]
        if self.rounding is None:
            return Fp8Weight(codes, scales).dequantize()
        zeros = None if self.zeros is None else self.zeros[expert]
        sizes = self.in_features, self.out_features
        return PackedWeight(self.rounding, *sizes, codes, scales, zeros).dequantize()


def _parts(weight: DeviceWeight) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(codes, scales, zeros) of a weight."""
    if isinstance(weight, torch.Tensor):
        return weight, None, None
    return weight.codes, weight.scales, getattr(weight, "zeros", None)
