"""FP8 checkpoints (`quant_method` fp8): e4m3 weights with a scale for all, for each output, or for
each block.

A module has `weight` [out, in] e4m3, and either `weight_scale` or, for blocks, `weight_scale_inv`
[ceil(out / rows), ceil(in / columns)]. Both are factors of the weight. Scales of activations, which
a static scheme stores, are not used: rows are rounded by their own largest value.
"""

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.formats.module import Module, Part
from kernels.quantized import Fp8Weight, Weight
from kernels.reference import FP8


class Fp8:
    """Reads modules of an FP8 checkpoint."""

    marker = "weight_scale_inv"
    parts = ("weight", "weight_scale", "weight_scale_inv", "input_scale")
    rounding = None

    def __init__(self, config: ConfigJson) -> None:
        block = config.get("weight_block_size")
        self.block = (int(block[0]), int(block[1])) if block else None
        if not self.block:
            self.marker = "weight_scale"

    def shape(self, module: Module) -> tuple[int, int]:
        num_outputs, num_inputs = module.shape("weight")
        return num_outputs, num_inputs

    def read(self, module: Module, part: Part) -> Weight:
        return read_fp8(module, part, self.marker, self.block)


def read_fp8(module: Module, part: Part, scale: str, block: tuple[int, int] | None) -> Weight:
    """Read a weight in e4m3. With scales by block it becomes float32, which has no other form.

    scale: the kind of the tensor with the scales.
    """
    codes = module.read("weight", part.rows, part.columns)
    if codes.dtype != FP8:
        raise UnsupportedModel(f"{module.name}.weight is in {codes.dtype}, not in float8_e4m3fn")
    scales = module.read(scale).float()
    if block is not None:
        rows = torch.arange(part.outputs.start, part.outputs.stop) // block[0]
        columns = torch.arange(part.inputs.start, part.inputs.stop) // block[1]
        return codes.float() * scales[rows][:, columns]
    if scales.numel() == 1:
        scales = scales.view(1, 1).expand(len(part.outputs), 1)
    else:
        scales = scales.view(-1, 1)[part.rows]
    return Fp8Weight(codes, scales.contiguous())
