"""A random model and random adapters as folders, in the forms of Hugging Face and PEFT."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from bench.gpu.engine_model import MODULES, llama_config, make_random_weights
from bench.gpu.machine import Machine
from lora.layout import PROJECTIONS, ModelShape

_ROOT = Path(__file__).parents[3]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_SHARDS = 8


def write_model(machine: Machine, folder: Path, shape: ModelShape, vocab_size: int) -> None:
    """Write a random Llama with the demo's tokenizer, whose ids are fewer than the vocabulary's."""
    folder.mkdir(parents=True)
    for name in _TOKENIZER:
        shutil.copy2(_ROOT / "demo" / "model" / name, folder)
    config = llama_config(shape, vocab_size) | {"torch_dtype": machine.dtype_name}
    (folder / "config.json").write_text(json.dumps(config))
    weights = make_random_weights(machine, shape, vocab_size)
    places = {}
    for number in range(_SHARDS):
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        shard = {key: weights.pop(key).cpu() for key in sorted(weights)[:: _SHARDS - number]}
        save_file(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)


def write_adapter(machine: Machine, folder: Path, shape: ModelShape, rank: int) -> None:
    """Write a random adapter on all projections; it adds about as much as there is."""
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(shape.num_layers):
        for number, name in enumerate(MODULES):
            inputs, outputs = shape.features(number)
            module = f"base_model.model.model.layers.{layer}.{name}"
            a = machine.randn(rank, inputs, std=inputs**-0.5).cpu()
            b = machine.randn(outputs, rank, std=rank**-0.5).cpu()
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": list(PROJECTIONS), "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
