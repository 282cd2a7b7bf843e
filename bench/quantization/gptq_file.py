"""Writes a checkpoint in the GPTQ format; `engine.models.formats.gptq` says what it holds."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kernels.quantized import QuantizedWeight

_WEIGHTS = "model.safetensors"
_PER_WORD = 8


def write_gptq(model_dir: Path, folder: Path, rounded: Mapping[str, QuantizedWeight]) -> None:
    """Write a copy of a model with rounded modules.   rounded: by name, all of one group size."""
    shutil.copytree(model_dir, folder)
    tensors = load_file(model_dir / _WEIGHTS)
    for name, weight in rounded.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in _module(weight).items()}
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": next(iter(rounded.values())).group_size,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _module(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The four tensors of a module. A zero of 8 is stored less 1."""
    num_inputs, scales = weight.shape[1], weight.scales.T
    zeros = torch.full(scales.shape, 7)
    return {
        "qweight": _packed(weight.codes.T.int() + 8),
        "qzeros": _packed(zeros.T).T.contiguous(),
        "scales": scales.half().contiguous(),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // weight.group_size,
    }


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """[n, m] codes from 0 to 15 -> [n / 8, m] words, the first in the lowest bits."""
    places = 4 * torch.arange(_PER_WORD).view(1, _PER_WORD, 1)
    words = codes.long().view(-1, _PER_WORD, codes.shape[1]) << places
    return words.sum(1).to(torch.int32)
