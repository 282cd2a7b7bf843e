"""Model folders and adapters to measure with: random weights of a real shape, or the demo's own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.models.checkpoint import projection_name
from engine.models.config import DecoderConfig
from engine.models.weights import load_config
from lora.layout import PROJECTIONS, ModelShape

_ROOT = Path(__file__).parent.parent
RANKS = (8, 16)
"""Ranks of a checkpoint's adapters, in turn."""
THREADS = 1
"""Threads that each measured system computes on."""

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "small-5m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.   adapters: name -> folder, as PEFT writes it."""

    model_dir: Path
    adapters: dict[str, Path]
    vocab_size: int

    @property
    def base_model(self) -> str:
        return self.model_dir.name

    @property
    def models(self) -> tuple[str, ...]:
        """The names that a request may give: the base model's and the adapters'."""
        return (self.base_model, *self.adapters)


def make_checkpoint(stack: str, folder: Path, num_adapters: int) -> Checkpoint:
    """Writes the checkpoint of a stack under `folder`, with the same bytes every time."""
    if stack == "demo":
        return _demo(folder)
    if stack == "smollm2":  # of `make model`
        return Checkpoint(_ROOT / "build" / stack, {}, SHAPES["smollm2-135m"]["vocab_size"])
    # Imported here: a machine with a GPU may lack it, and does not make such a model.
    from transformers import LlamaConfig

    config = LlamaConfig(
        **SHAPES[stack], tie_word_embeddings=True,
        eos_token_id=0, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model_dir = folder / stack
    model_dir.mkdir(parents=True)
    _save_model(config, model_dir)
    _save_tokenizer(config.vocab_size, model_dir)
    shape = DecoderConfig.parse(load_config(model_dir)).shape
    adapters = {}
    for number in range(num_adapters):
        name = f"adapter-{number:03}"
        adapters[name] = folder / "adapters" / name
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(number))
        write_adapter(adapters[name], shape, RANKS[number % len(RANKS)], randn)
    return Checkpoint(model_dir, adapters, config.vocab_size)


def write_adapter(
    folder: Path, shape: ModelShape, rank: int, randn: Callable[..., torch.Tensor]
) -> None:
    """Write an adapter with random A and B on all seven projections, as PEFT does; it is large
    enough to change the model's output.

    randn: makes random numbers of a size, in the adapter's dtype.
    """
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for projection in shape.adapted:
            width_in, width_out = shape.features(projection)
            module = f"base_model.model.{projection_name(layer, projection)}"
            a, b = randn(rank, width_in), randn(width_out, rank)
            tensors[f"{module}.lora_A.weight"] = (a * 0.5 / width_in**0.5).cpu()
            tensors[f"{module}.lora_B.weight"] = (b * 0.5 / rank**0.5).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS), "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _demo(folder: Path) -> Checkpoint:
    """Return the demo's model and adapters; the model is copied to a folder named after it."""
    model_dir = folder / "demo"
    shutil.copytree(_ROOT / "demo" / "model", model_dir)
    adapters = {path.name: path for path in sorted((_ROOT / "demo" / "adapters").iterdir())}
    config = json.loads((model_dir / "config.json").read_text())
    return Checkpoint(model_dir, adapters, config["vocab_size"])


def _save_model(config: Any, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Twice the scale that keeps the variance: smaller weights repeat one token for ever.
            scale = 1.0 if "embed" in name else 2.0 / parameter.shape[1] ** 0.5
            torch.nn.init.normal_(parameter, std=scale)
    model.save_pretrained(folder)


def _save_tokenizer(vocab_size: int, folder: Path) -> None:
    """Writes a byte-level BPE tokenizer: every byte, then pairs of bytes until ids run out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet][: vocab_size - 1 - len(alphabet)]
    tokens = ["<|end|>", *alphabet, *(a + b for a, b in pairs)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
