"""AWQ files (arXiv 2306.00978) of the kind `gemm`, as AutoAWQ writes them.

A module has `qweight` [in, out / 8] int32, `scales` [groups, out] and `qzeros` [groups, out / 8]
int32. A word holds eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.formats.module import Module, Part, grouped, unpack
from kernels.quantized import Rounding, Weight

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of the outputs 0 to 7 in a word."""


class Awq:
    """Reads modules of an AWQ checkpoint."""

    marker = "qweight"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: ConfigJson) -> None:
        bits = config.get("bits", config.get("w_bit", 4))
        kind = str(config.get("version") or config.get("format") or "gemm").lower()
        if bits != 4 or kind != "gemm":
            raise UnsupportedModel(
                f"AWQ of {bits} bits in the format {kind} is not served; 4 bits in gemm are"
            )
        size = config.get("group_size", config.get("q_group_size", 128))
        self.rounding = Rounding(
            4, size if size > 0 else None, bool(config.get("zero_point", True))
        )

    def shape(self, module: Module) -> tuple[int, int]:
        num_inputs, words = module.shape("qweight")
        return words * 8, num_inputs

    def read(self, module: Module, part: Part) -> Weight:
        words = slice(part.outputs.start // 8, -(-part.outputs.stop // 8))
        wanted = slice(part.outputs.start % 8, part.outputs.start % 8 + len(part.outputs))
        num_inputs, num_groups = self.shape(module)[1], module.shape("scales")[0]
        size = self.rounding.group_size or num_inputs
        groups = module.groups(part, num_inputs, num_groups, size)
        codes = _in_order(module.read("qweight", part.columns, words))[:, wanted]
        scales = module.read("scales", groups, part.rows)
        zeros = None
        if module.has("qzeros"):
            zeros = _in_order(module.read("qzeros", groups, words))[:, wanted].T
        return grouped(4, codes.T, scales.T, zeros, size)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Signed codes of words, outputs in order.   words: [n, out / 8].   Result: [n, out] int8."""
    codes = unpack(words, 4, dim=1).view(len(words), -1, 8)[..., list(_PLACES)]
    return codes.flatten(1).to(torch.int8) - 8
