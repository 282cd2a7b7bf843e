"""Checkpoints of the library compressed-tensors: pack-quantized, int-quantized, float-quantized.

Packed modules have `weight_packed` [out, in / 8] int32 with eight inputs in a word, lowest bits
first and 8 added, `weight_scale` [out, groups] and, if asymmetric, `weight_zero_point`
[out / 8, groups], packed likewise along the outputs; `weight_g_idx` [in] with act-order.
The others have `weight` [out, in] in int8 or e4m3 with `weight_scale` [out, 1], [1] or by block.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.formats.fp8 import read_fp8
from engine.models.formats.module import Module, Part, grouped, regrouped, unpack
from kernels.quantized import Rounding, Weight

logger = logging.getLogger(__name__)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class CompressedTensors:
    """Reads modules of a compressed-tensors checkpoint."""

    marker = "weight_scale"
    parts = (
        *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        *("weight_g_idx", "input_scale", "input_zero_point"),
    )

    def __init__(self, config: ConfigJson) -> None:
        groups = list((config.get("config_groups") or {}).values())
        formats = {group.get("format") or config.get("format") for group in groups}
        if not groups or formats - set(_FORMATS):
            raise UnsupportedModel(
                f"compressed-tensors in {sorted(map(str, formats))} is not served; "
                f"{', '.join(_FORMATS)} are: quantise the model again with one of their schemes"
            )
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnsupportedModel("compressed-tensors with sparse weights is not served")
        schemes = [_checked(group.get("weights") or {}) for group in groups]
        self.bits: int = schemes[0]["num_bits"]
        self.block: tuple[int, int] | None = None
        if any(scheme["num_bits"] != self.bits for scheme in schemes):
            raise UnsupportedModel("compressed-tensors with several numbers of bits is not served")
        if block := schemes[0].get("block_structure"):
            self.block = (int(block[0]), int(block[1]))
        size = schemes[0].get("group_size") or -1
        self.group_size = size if size > 0 else None
        self.rounding = None
        if schemes[0]["type"] != "float":
            groups_of_4 = self.group_size if self.bits == 4 else None
            has_zeros = self.bits == 4 and not schemes[0].get("symmetric", True)
            self.rounding = Rounding(4 if self.bits == 4 else 8, groups_of_4, has_zeros)

    def shape(self, module: Module) -> tuple[int, int]:
        if module.has("weight"):
            num_outputs, num_inputs = module.shape("weight")
        else:
            num_outputs, num_inputs = module.read("weight_shape").tolist()
        return num_outputs, num_inputs

    def read(self, module: Module, part: Part) -> Weight:
        if self.rounding is None:
            return read_fp8(module, part, "weight_scale", self.block)
        num_inputs, num_groups = self.shape(module)[1], module.shape("weight_scale")[-1]
        if module.has("weight"):
            codes = module.read("weight", part.rows, part.columns)
            zeros = module.read("weight_zero_point") if module.has("weight_zero_point") else None
        else:
            codes, zeros = self._codes(module, part), self._zeros(module, part, num_groups)
        scales = module.read("weight_scale").float()
        scales = scales.view(-1, num_groups).expand(self.shape(module)[0], num_groups)[part.rows]
        if zeros is not None and len(zeros) != len(scales):
            zeros = zeros.view(-1, num_groups).expand(self.shape(module)[0], num_groups)[part.rows]
        if module.has("weight_g_idx"):
            logger.warning("%s: its act-order is not kept, it is rounded to 8 bits", module.name)
            index = module.read("weight_g_idx").long()[part.columns]
            return regrouped(codes, scales, zeros, index)
        size = self.group_size or num_inputs
        groups = module.groups(part, num_inputs, num_groups, size)
        zeros = None if zeros is None else zeros[:, groups]
        return grouped(self.bits, codes, scales[:, groups], zeros, size)

    def _codes(self, module: Module, part: Part) -> torch.Tensor:
        per_word = 32 // self.bits
        words = slice(part.inputs.start // per_word, -(-part.inputs.stop // per_word))
        packed = module.read("weight_packed", part.rows, words)
        codes = unpack(packed, self.bits, dim=1)[:, part.inputs.start % per_word :]
        return self._signed(codes[:, : len(part.inputs)])

    def _zeros(self, module: Module, part: Part, num_groups: int) -> torch.Tensor | None:
        if not module.has("weight_zero_point"):
            return None
        packed = module.read("weight_zero_point").view(-1, num_groups)
        return self._signed(unpack(packed, self.bits, dim=0)[part.rows])

    def _signed(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes.short() - (1 << (self.bits - 1))).to(torch.int8)


def _checked(scheme: Mapping[str, Any]) -> Mapping[str, Any]:
    """A scheme of weights that is served. Raises UnsupportedModel."""
    bits, kind = scheme.get("num_bits"), scheme.get("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise UnsupportedModel(
            f"compressed-tensors weights of type {kind} with {bits} bits are not served; int with "
            "4 or 8 bits and float with 8 bits are"
        )
    return scheme
