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

BLOCK = 2 * STEP
"""Inputs of which a program loads the codes at once, and of which weights have a multiple."""

_NIBBLE_ZERO = 8
"""Added to codes of 4 bits, and to their zeros, so that nibbles have no sign."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A QuantizedWeight whose codes lie input by input, as the right operand of a product.

    codes: with 8 bits int8 [blocks, 64, columns]. With 4 bits uint8 [blocks, 32, columns]: byte i
    of an output has the codes of two inputs of the block, i in the low nibble and 32 + i in the
    high one, and 8 is added to every code.
    scales: [groups, columns] float32.
    zeros: [groups, columns] float32, with 8 added if there are 4 bits; None if zero is code 0.
    They are not bytes, since a kernel prefetches no fewer than 4 bytes for a thread.
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
        codes, zero = self.codes, 0
        if self.rounding.bits == 4:
            codes, zero = torch.cat((codes & 15, codes >> 4), dim=1), _NIBBLE_ZERO
        codes = codes.flatten(0, 1)[: self.in_features].float()
        inputs = torch.arange(self.in_features, device=codes.device)
        groups = inputs // (self.rounding.group_size or self.in_features)
        codes -= zero if self.zeros is None else self.zeros[groups]
        return (codes * self.scales[groups])[:, : self.out_features].T


def can_pack(rounding: Rounding) -> bool:
    """Whether `pack` takes weights of this rounding."""
    return rounding.group_size is None or rounding.group_size % STEP == 0


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Pack a weight of any widths, on the device on which it lies."""
    rounding, (out_features, in_features) = weight.rounding, weight.shape
    assert can_pack(rounding)
    spare_inputs, spare_columns = -in_features % BLOCK, -out_features % COLUMNS
    codes = pad(weight.codes, (0, spare_inputs, 0, spare_columns)).T.unflatten(0, (-1, BLOCK))
    if rounding.bits == 4:
        low, high = (codes + _NIBBLE_ZERO).to(torch.uint8).split(STEP, dim=1)
        codes = low | (high << 4)
    # Padded inputs may begin another group, whose scale is read, too.
    group_size = rounding.group_size or in_features + spare_inputs
    num_groups = -(-(in_features + spare_inputs) // group_size)

    def of_groups(values: torch.Tensor) -> torch.Tensor:
        spare_groups = num_groups - values.shape[1]
        return pad(values.float(), (0, spare_groups, 0, spare_columns)).T.contiguous()

    zeros = None
    if weight.zeros is not None:
        zeros = of_groups(weight.zeros + (_NIBBLE_ZERO if rounding.bits == 4 else 0))
    return PackedWeight(
        rounding, in_features, out_features, codes.contiguous(), of_groups(weight.scales), zeros
    )
