"""Weights in few bits: how they are rounded, and which numbers they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a weight was rounded to integers. Weights that differ in it cannot share a product.

    group_size: number of inputs that share a scale; None if all inputs of an output do.
    has_zeros: whether zero is another code in every group (asymmetric), or always code 0.
    """

    bits: Bits
    group_size: int | None = None
    has_zeros: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """weight[o, i] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group].

    codes: [out, in] int8, from -8 to 7 if there are 4 bits.   scales: [out, groups] float32.
    zeros: [out, groups] int8, in the range of the codes; None if all are 0.
    """

    rounding: Rounding
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.rounding.group_size or self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Size with codes packed: what a product reads."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.numel() * self.rounding.bits // 8 + self.scales.nbytes + zeros

    def dequantize(self) -> torch.Tensor:
        """The weight as it is meant, [out, in] float32."""
        codes = self.codes.view(len(self.codes), -1, self.group_size).float()
        if self.zeros is not None:
            codes -= self.zeros.unsqueeze(-1)
        return (codes * self.scales.unsqueeze(-1)).flatten(1)

    def to(self, device: torch.device) -> Self:
        """Return the same weight on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Put the outputs of weights of the same rounding side by side."""
        first = parts[0]
        assert all(part.rounding == first.rounding for part in parts)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return cls(
            first.rounding,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(zeros) if zeros else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """weight = codes * scales.   codes: [out, in] e4m3.   scales: [out, 1] float32."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> torch.Tensor:
        """The weight as it is meant, [out, in] float32."""
        assert self.codes.dtype == torch.float8_e4m3fn
        return self.codes.float() * self.scales

    def to(self, device: torch.device) -> Self:
        """Return the same weight on a device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Put the outputs of weights side by side."""
        return cls(
            torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        )


Weight = torch.Tensor | QuantizedWeight | Fp8Weight
"""A weight [out, in]: floating-point numbers, or codes with their scales."""


def as_numbers(weight: Weight) -> torch.Tensor:
    """The numbers that a weight stands for, [out, in]."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def form_of(weight: Weight) -> Rounding | str:
    """A value that is equal for weights that can share a product."""
    if isinstance(weight, QuantizedWeight):
        return weight.rounding
    return "fp8" if isinstance(weight, Fp8Weight) else "dense"


def concatenated(weights: Sequence[Weight]) -> Weight:
    """Put the outputs of weights of the same form side by side."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(cast(list[torch.Tensor], weights))
    return type(first).concatenate(weights)  # type: ignore[arg-type]


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Round x, [T, in], as a CPU does before a product with codes: 8 bits, a scale for each row."""
    step = x.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
    return (x / step).round() * step


def quantize(weight: torch.Tensor, rounding: Rounding) -> QuantizedWeight:
    """Round to the nearest codes; the values of a group are spread over all codes.

    weight: [out, in] of a floating dtype. Where the groups do not divide `in`, it gets 8 bits with
    a scale for each output instead, as no product has a group that is smaller than the others.
    """
    if weight.shape[1] % (rounding.group_size or 1):
        rounding = Rounding(8)
    groups = weight.float().view(len(weight), -1, rounding.group_size or weight.shape[1])
    most = (1 << (rounding.bits - 1)) - 1
    if rounding.has_zeros:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = _scales((high - low) / (2 * most + 1), rounding)
        zeros = (-low / scales).round() - most - 1
        codes = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
        codes = codes.clamp(-most - 1, most).to(torch.int8)
        return QuantizedWeight(rounding, codes.flatten(1), scales, zeros.to(torch.int8))
    scales = _scales(groups.abs().amax(dim=2) / most, rounding)
    codes = (groups / scales.unsqueeze(-1)).round().clamp(-most, most)
    return QuantizedWeight(rounding, codes.to(torch.int8).flatten(1), scales)


def _scales(steps: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """The scales for codes that are so far apart, float32; 1 for groups of zeros.

    Scales of groups are numbers of float16, of which half as many bytes are read (PackedWeight).
    They are chosen before the codes, so that codes lose nothing by it. Where float16 has fewer bits
    than usual, for a scale below 2 ** -14, they stay what they are.
    """
    scales = torch.where(steps > 0, steps.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    if rounding.group_size is None:
        return scales
    is_normal = (scales >= 2**-14) & (scales <= 2**15)
    return torch.where(is_normal, scales.half().float(), scales)
