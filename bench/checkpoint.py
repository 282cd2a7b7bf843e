"""Model folders and adapters to measure with: random weights of a real shape, or the demo's own."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

_ROOT = Path(__file__).parent.parent
_PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
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


def make_checkpoint(stack: str, folder: Path, num_adapters: int) -> Checkpoint:
    """Writes the checkpoint of a stack under `folder`, with the same bytes every time."""
    if stack == "demo":
        return _demo(folder)
    if stack == "smollm2":  # of `make model`
        return Checkpoint(_ROOT / "build" / stack, {}, SHAPES["smollm2-135m"]["vocab_size"])
    config = LlamaConfig(
        **SHAPES[stack], tie_word_embeddings=True,
        eos_token_id=0, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model_dir = folder / stack
    model_dir.mkdir(parents=True)
    _save_model(config, model_dir)
    _save_tokenizer(config.vocab_size, model_dir)
    adapters = {}
    for number in range(num_adapters):
        name = f"adapter-{number:03}"
        adapters[name] = folder / "adapters" / name
        save_adapter(stack, adapters[name], RANKS[number % len(RANKS)], seed=number)
    return Checkpoint(model_dir, adapters, config.vocab_size)


def save_adapter(stack: str, folder: Path, rank: int, seed: int) -> None:
    """Writes an adapter with random A and B on all seven projections, large enough to change the
    model's output.
    """
    folder.mkdir(parents=True)
    shape = SHAPES[stack]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for block, names in _PROJECTIONS.items():
            for name in names:
                module = f"base_model.model.model.layers.{layer}.{block}.{name}"
                width_in, width_out = _features(shape, name)
                a = torch.randn(rank, width_in, generator=generator) * 0.5 / width_in**0.5
                b = torch.randn(width_out, rank, generator=generator) * 0.5 / rank**0.5
                tensors[f"{module}.lora_A.weight"] = a
                tensors[f"{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name for names in _PROJECTIONS.values() for name in names]
    LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM"
    ).save_pretrained(str(folder))


def _demo(folder: Path) -> Checkpoint:
    """Return the demo's model and adapters; the model is copied to a folder named after it."""
    model_dir = folder / "demo"
    shutil.copytree(_ROOT / "demo" / "model", model_dir)
    adapters = {path.name: path for path in sorted((_ROOT / "demo" / "adapters").iterdir())}
    config = json.loads((model_dir / "config.json").read_text())
    return Checkpoint(model_dir, adapters, config["vocab_size"])


def _save_model(config: LlamaConfig, folder: Path) -> None:
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


def _features(shape: dict[str, Any], projection: str) -> tuple[int, int]:
    """Return the (in, out) widths of a projection."""
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }[projection]
