"""An adapter of mlx-lm, turned into PEFT's form.

mlx-lm computes y + scale * (x @ lora_a) @ lora_b with lora_a [in, r] and lora_b [r, out]
(mlx_lm/tuner/lora.py), so both are transposed for PEFT, whose lora_alpha is scale * r.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from registry.errors import InvalidAdapter, shown
from registry.formats.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, MLX_KEYS
from registry.formats.peft_format import (
    ADAPTER_DTYPES,
    DTYPE_BYTES,
    WEIGHTS_FILE,
    TensorInfo,
    read_header,
    read_tensor_chunks,
)
from registry.strict_json import parse_object
from server.cli.adapter_folder import NotSendable
from server.cli.weight_shards import write_weights

_LAYER = re.compile(r"layers\.\d+\.")
_EMBEDDING = "embed_tokens"


def read_config(path: Path) -> dict[str, Any] | None:
    """The config in a file if mlx-lm wrote it; None for any other file, also for a damaged one."""
    try:
        with path.open("rb") as file:
            config = parse_object(file.read(MAX_CONFIG_BYTES + 1), param=path.name)
    except (InvalidAdapter, OSError):
        return None
    is_of_mlx = MLX_KEYS & config.keys() and "peft_type" not in config
    return config if is_of_mlx else None


def convert(config: dict[str, Any], weights: Path, made: Path) -> None:
    """Write the two files of PEFT to `made`. Raises NotSendable, InvalidAdapter, OSError."""
    rank, scale = _rank_and_scale(config)
    targets, tensors = set(), {}
    with weights.open("rb") as file:
        header = read_header(file, weights.stat().st_size, filename=weights.name)
        for name, info in header.tensors.items():
            module, _, side = name.rpartition(".lora_")
            is_matrix = len(info.shape) == 2 and info.dtype in ADAPTER_DTYPES
            if not module or side not in ("a", "b") or not is_matrix:
                raise NotSendable(f"{weights.name}: {shown(name)} is no LoRA of a matrix.")
            if info.shape[side == "a"] != rank:
                raise NotSendable(f"{weights.name}: {shown(name)} is not of rank {rank}.")
            # The end of the name, by which PEFT finds the module whatever is before the layers.
            layer = _LAYER.search(module)
            target = module[layer.start() :] if layer else module.rpartition(".")[2]
            targets.add(target)
            end = "embedding_{}" if target == _EMBEDDING else "{}.weight"
            transposed = replace(info, shape=info.shape[::-1]), _transposed(file, info)
            tensors[f"base_model.model.{module}.lora_{end.format(side.upper())}"] = transposed
        write_weights(made / WEIGHTS_FILE, tensors)
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("model"),
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted(targets),
        # mlx-lm applies the LoRA of an embedding where that is the model's head, too.
        "ensure_weight_tying": _EMBEDDING in targets,
    }
    (made / CONFIG_FILE).write_text(json.dumps(peft_config))


def _rank_and_scale(config: dict[str, Any]) -> tuple[int, float]:
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        what = f"fine_tune_type is {shown(str(kind))}; train with --fine-tune-type lora"
        raise NotSendable(f"{CONFIG_FILE}: {what}.")
    found = config.get("lora_parameters")
    parameters = found if isinstance(found, dict) else {}
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if type(rank) is not int or rank < 1 or not isinstance(scale, int | float):
        raise NotSendable(f"{CONFIG_FILE}: lora_parameters needs a rank and a scale.")
    # Old releases multiply scale by alpha / rank, new ones ignore alpha.
    if "alpha" in parameters:
        what = "lora_parameters.alpha is ambiguous; give the whole factor as scale alone"
        raise NotSendable(f"{CONFIG_FILE}: {what}.")
    return rank, float(scale)


def _transposed(file: BinaryIO, info: TensorInfo) -> Iterator[bytes]:
    import numpy as np

    words = np.frombuffer(b"".join(read_tensor_chunks(file, info)), f"u{DTYPE_BYTES[info.dtype]}")
    yield words.reshape(info.shape).T.tobytes()
