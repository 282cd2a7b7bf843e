"""A random model as a folder, in the form of Hugging Face."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from bench.gpu.engine_model import llama_config, make_random_weights
from bench.gpu.machine import Machine
from lora.layout import ModelShape

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
