"""A Hugging Face folder of safetensors, loaded onto a device. No pickles, no transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def load_config(model_dir: Path) -> dict[str, object]:
    return json.loads((model_dir / "config.json").read_text())


def load_weights(
    model_dir: Path, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All tensors of all shards, by name. Raises FileNotFoundError where there are none."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    weights: dict[str, torch.Tensor] = {}
    for shard in shards:
        loaded = load_file(model_dir / shard, device=str(device))
        weights |= {name: tensor.to(dtype) for name, tensor in loaded.items()}
    return weights
