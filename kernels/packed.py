"""Quantised weights in the order in which a GPU's kernel reads them."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.quantized import QuantizedWeight, Rounding

COLUMNS = 128
"""Number of which the outputs of a packed weight are a multiple. Programs read whole tiles, so only
what they write has to be masked.
"""

STEP = 32
"""Inputs that a `tl.dot` sums at once; they share a scale, so groups are whole steps."""

_WORD_BITS = 16

GROUPS = 2
"""Groups whose scales share a word of 4 bytes, if 16 bits hold each; so do their zeros. A kernel
prefetches no fewer than 4 bytes for a thread.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A QuantizedWeight whose codes lie input by input, as the right operand of a product.

    codes: int16 [blocks, 32, columns]. Word i of an output has the codes of inputs i, 32 + i, ..
    of the block, the first in the lowest bits; 2 ** (bits - 1) is added to each. Words of 16 bits
    are what a kernel takes out of shared memory with the fewest instructions.
    scales: [groups, columns] float32; or float16 [pairs of groups, columns, 2] if there are
    groups and nothing is lost: scales of published checkpoints are float16, and so are those that
    `quantize` chooses.
    zeros: float16 [pairs of groups, columns, 2], raised like the codes; None if zero is code 0.
    columns: outputs, padded to a multiple of 128 with a scale of 0. Inputs are padded to whole
    blocks; what their codes stand for is finite, and has to be multiplied by 0.
    """

    rounding: Rounding
    in_features: int
    out_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def dequantize(self) -> torch.Tensor:
        """The weight as it is meant, [out, in] float32."""
        bits, words = self.rounding.bits, self.codes.to(torch.int32)
        fields = [words >> at & (1 << bits) - 1 for at in range(0, _WORD_BITS, bits)]
        codes = torch.cat(fields, dim=1).flatten(0, 1)[: self.in_features].float()
        inputs = torch.arange(self.in_features, device=codes.device)
        groups = inputs // (self.rounding.group_size or self.in_features)
        codes -= _raised_by(self.rounding) if self.zeros is None else by_group(self.zeros)[groups]
        return (codes * by_group(self.scales)[groups])[:, : self.out_features].T


def block_size(bits: int) -> int:
    """Inputs of a block, whose codes a program loads at once."""
    return STEP * _WORD_BITS // bits


def can_pack(rounding: Rounding) -> bool:
    """Whether `pack` takes weights of this rounding."""
    return rounding.group_size is None or rounding.group_size % STEP == 0


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Pack a weight of any widths, on the device on which it lies."""
    rounding, (out_features, in_features) = weight.rounding, weight.shape
    assert can_pack(rounding)
    block = block_size(rounding.bits)
    spare_inputs, spare_columns = -in_features % block, -out_features % COLUMNS
    codes = pad(weight.codes, (0, spare_inputs, 0, spare_columns)).T.unflatten(0, (-1, block))
    words = codes.new_zeros((len(codes), STEP, codes.shape[2]), dtype=torch.int32)
    for index, field in enumerate(codes.split(STEP, dim=1)):
        words |= field.int() + _raised_by(rounding) << rounding.bits * index
    # Padded inputs may begin another group, whose scale is read, too.
    group_size = rounding.group_size or in_features + spare_inputs
    num_groups = -(-(in_features + spare_inputs) // group_size)

    def of_groups(values: torch.Tensor, *, is_narrow: bool) -> torch.Tensor:
        spare_groups = num_groups - values.shape[1] + (num_groups % GROUPS if is_narrow else 0)
        found = pad(values, (0, spare_groups, 0, spare_columns)).T
        if is_narrow:
            found = found.half().unflatten(0, (-1, GROUPS)).transpose(1, 2)
        return found.contiguous()

    zeros, scales = None, weight.scales
    if weight.zeros is not None:
        raised = weight.zeros.int() + _raised_by(rounding)
        zeros = of_groups(raised, is_narrow=True)
    is_narrow = rounding.group_size is not None and torch.equal(scales.half().float(), scales)
    scales = of_groups(scales, is_narrow=is_narrow)
    return PackedWeight(rounding, in_features, out_features, words.to(torch.int16), scales, zeros)


def _raised_by(rounding: Rounding) -> int:
    """The number that is added to codes, so that they have no sign."""
    return 1 << (rounding.bits - 1)


def by_group(values: torch.Tensor) -> torch.Tensor:
    """Scales or zeros, [.., groups, columns] float32; there may be one group more."""
    is_narrow = values.dtype == torch.float16
    return values.transpose(-2, -1).flatten(-3, -2).float() if is_narrow else values
