"""GPTQ files (arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

A module has `qweight` [in / 8, out] int32 with eight inputs in a word, `scales` [groups, out],
`qzeros` [groups, out / 8] int32 with eight outputs in a word, and `g_idx` [in], the group of each
input. The first version of the format stores zeros less 1, the second (gptq_v2) as they are.
"""

import logging

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.formats.module import Module, Part, grouped, regrouped, unpack
from kernels.quantized import Rounding, Weight

logger = logging.getLogger(__name__)


class Gptq:
    """Reads modules of a GPTQ checkpoint of 4 or 8 bits."""

    marker = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: ConfigJson) -> None:
        self.bits: int = config["bits"]
        if self.bits not in (4, 8):
            raise UnsupportedModel(f"GPTQ with {self.bits} bits is not served; 4 and 8 are")
        if any(not name.startswith("-:") for name in config.get("dynamic") or ()):
            raise UnsupportedModel("GPTQ with `dynamic` settings by module is not served")
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"the GPTQ format {form} is not served; save the checkpoint as gptq"
            )
        self.least_zero = 1 if form == "gptq" else 0
        size = config.get("group_size", -1)
        self.group_size = size if size > 0 else None
        self.rounding = Rounding(
            4 if self.bits == 4 else 8,
            self.group_size if self.bits == 4 else None,
            has_zeros=self.bits == 4 and not config.get("sym", True),
        )

    def shape(self, module: Module) -> tuple[int, int]:
        words, num_outputs = module.shape("qweight")
        return num_outputs, words * 32 // self.bits

    def read(self, module: Module, part: Part) -> Weight:
        per_word, half = 32 // self.bits, 1 << (self.bits - 1)
        num_inputs = self.shape(module)[1]
        words = slice(part.inputs.start // per_word, -(-part.inputs.stop // per_word))
        codes = unpack(module.read("qweight", words, part.rows), self.bits, dim=0)
        codes = codes[part.inputs.start % per_word :][: len(part.inputs)].short() - half
        scales = module.read("scales")[:, part.rows]
        stored = unpack(module.read("qzeros"), self.bits, dim=1)[:, part.rows]
        zeros = stored.short() + self.least_zero - half
        size = self.group_size or num_inputs
        in_order = torch.arange(num_inputs) // size
        codes, zeros = codes.to(torch.int8), zeros.to(torch.int8)
        index = module.read("g_idx").long() if module.has("g_idx") else in_order
        if not torch.equal(index, in_order):
            logger.warning("%s: its act-order is not kept, it is rounded to 8 bits", module.name)
            return regrouped(codes.T, scales.T, zeros.T, index[part.columns])
        groups = module.groups(part, num_inputs, len(scales), size)
        return grouped(self.bits, codes.T, scales[groups].T, zeros[groups].T, size)
