"""A module of a quantised checkpoint: its tensors, and the part of its weight that is read."""

from dataclasses import dataclass

import torch

from engine.errors import UnsupportedModel
from engine.models.tensor_files import ALL, TensorFiles
from kernels.quantized import QuantizedWeight, Rounding, quantize

_GROUP_MULTIPLE = 32
"""Number of inputs of which the products with 4-bit weights want a multiple as a group."""


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs and inputs of a weight [out, in]."""

    outputs: range
    inputs: range

    @property
    def rows(self) -> slice:
        return slice(self.outputs.start, self.outputs.stop)

    @property
    def columns(self) -> slice:
        return slice(self.inputs.start, self.inputs.stop)


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of a module, such as "model.layers.0.mlp.up_proj", by the ends of their names."""

    files: TensorFiles
    name: str

    def has(self, kind: str) -> bool:
        return f"{self.name}.{kind}" in self.files.names

    def shape(self, kind: str) -> tuple[int, ...]:
        return self.files.shape(self._named(kind))

    def read(self, kind: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Raises UnsupportedModel if there is no such tensor."""
        return self.files.read(self._named(kind), rows, columns)

    def groups(self, part: Part, num_inputs: int, num_groups: int, size: int) -> slice:
        """Groups of scales that belong to a part. Raises UnsupportedModel if it cuts one.

        size: inputs of a group; the last group of a module may have fewer.
        """
        if num_groups == 1:
            return slice(0, 1)
        if -(-num_inputs // size) != num_groups:
            raise UnsupportedModel(
                f"{self.name} has {num_groups} groups of scales for {num_inputs} inputs, but its "
                f"group_size is {size}: quantise the model again, or mend its quantization_config"
            )
        if part.inputs.start % size or (part.inputs.stop % size and part.inputs.stop != num_inputs):
            raise UnsupportedModel(
                f"{self.name} has groups of {size} inputs, which cannot be shared out among ranks: "
                "take a smaller tensor_parallel_size"
            )
        return slice(part.inputs.start // size, -(-part.inputs.stop // size))

    def _named(self, kind: str) -> str:
        if not self.has(kind):
            raise UnsupportedModel(f"the checkpoint has no tensor {self.name}.{kind}")
        return f"{self.name}.{kind}"


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned codes in int32 words, lowest bits first, along a dimension of a matrix.

    Result: uint8, 32 / bits times as long in that dimension.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shifts = shifts.view(-1, 1) if dim == 0 else shifts
    codes = (packed.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def grouped(
    bits: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size: int
) -> QuantizedWeight:
    """Make a weight of groups of equal size, or round to 8 bits what has no kernel of its own.

    codes: [out, in], zeros: [out, groups], both signed int8.   scales: [out, groups].
    size: inputs of a group; the last group may have fewer.
    """
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    size = min(size, num_inputs)
    if zeros is not None and not zeros.any():
        zeros = None
    if num_inputs % size == 0 and _has_kernel(bits, size, num_groups, zeros):
        rounding = Rounding(
            4 if bits == 4 else 8, size if num_groups > 1 else None, zeros is not None
        )
        return QuantizedWeight(rounding, codes, scales.float().contiguous(), zeros)
    return regrouped(codes, scales, zeros, torch.arange(num_inputs) // size)


def regrouped(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input: torch.Tensor,
) -> QuantizedWeight:
    """Round a weight again, to 8 bits, which loses little next to what 4 bits have lost.

    group_of_input: [in], the group whose scale and zero an input has.
    """
    numbers = codes.float()
    if zeros is not None:
        numbers -= zeros[:, group_of_input]
    return quantize(numbers * scales.float()[:, group_of_input], Rounding(8))


def _has_kernel(bits: int, size: int, num_groups: int, zeros: torch.Tensor | None) -> bool:
    if bits == 8:
        return num_groups == 1 and zeros is None
    return size % _GROUP_MULTIPLE == 0
