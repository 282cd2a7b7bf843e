"""Random models of the served families, and random adapters for them, made without any files."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.checkpoint import expert_projection_name, router_name
from engine.models.config import DecoderConfig
from lora.batch import DeviceTables
from lora.host import PackedAdapter, read_packed
from lora.layout import PROJECTIONS, Layout, ModelShape, Ranks
from lora.packed import PackedForm
from lora.packing import pack
from lora.shard import WHOLE, Shard
from registry.formats.architecture import ARCHITECTURES
from registry.formats.peft_format import (
    CanonicalAdapter,
    ModuleScale,
    TensorInfo,
    canonical_header,
    lora_names,
)
from tests.gpu.setting import ModelSizes

BASE_REVISION = "base-1"

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 11},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "olmo2": {},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0, "sliding_window": 11},
    "gemma3_text": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 11,
        "sliding_window_pattern": 2,
        "rope_parameters": None,
    },
    "phi3": {"partial_rotary_factor": 0.75},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 5},
}
"""Extra entries of config.json by model_type."""

VARIANTS = ("gemma2", "gemma3_text", "phi3", "olmo2", "granite")
"""Families that differ from the first ones in a layer's formulas only."""

_MODULES = {
    **{f"self_attn.{name}": number for number, name in enumerate(PROJECTIONS[:4])},
    **{f"mlp.{name}": 4 + number for number, name in enumerate(PROJECTIONS[4:])},
}


def make_config(family: str, sizes: ModelSizes) -> DecoderConfig:
    names = {model_type: name for name, model_type in ARCHITECTURES.items()}
    return DecoderConfig.parse(
        {
            "architectures": [names[family]],
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocab,
            "max_position_embeddings": sizes.max_model_len,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **FAMILIES[family],
        }
    )


def make_form(config: DecoderConfig, dtype: torch.dtype, num_shards: int = 1) -> PackedForm:
    layout = Layout.of(config.shape, dtype.itemsize, num_shards=num_shards)
    return PackedForm(layout, str(dtype).removeprefix("torch."), BASE_REVISION)


def make_weights(
    config: DecoderConfig, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """Weights by their Hugging Face names, in host memory, of values that `dtype` can represent.
    None are ones or zeros, so that a forgotten norm or bias is noticed.
    """
    shape, weights = config.shape, {}

    def matrix(name: str, rows: int, columns: int, scale: float) -> None:
        weights[name] = (torch.randn(rows, columns, generator=rng) * scale).to(dtype)

    def vector(name: str, size: int, low: float, high: float) -> None:
        weights[name] = (low + (high - low) * torch.rand(size, generator=rng)).to(dtype)

    matrix("model.embed_tokens.weight", config.vocab_size, shape.hidden_size, 1.0)
    if not config.tie_word_embeddings:
        scale = 2 / shape.hidden_size**0.5
        matrix("lm_head.weight", config.vocab_size, shape.hidden_size, scale)
    vector("model.norm.weight", shape.hidden_size, 0.5, 1.5)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in config.norms:
            vector(f"{prefix}.{norm}.weight", shape.hidden_size, 0.5, 1.5)
        for norm, size in zip("qk", config.qk_norm_sizes or (), strict=False):
            vector(f"{prefix}.self_attn.{norm}_norm.weight", size, 0.5, 1.5)
        experts = config.experts[layer]
        for name, projection in list(_MODULES.items())[: 4 if experts else None]:
            inputs, outputs = config.features(projection)
            matrix(f"{prefix}.{name}.weight", outputs, inputs, 2 / inputs**0.5)
            if config.biases[projection]:
                vector(f"{prefix}.{name}.bias", outputs, -0.5, 0.5)
        if experts:
            hidden, width = shape.hidden_size, experts.width
            # Numbers of a router are as far from each other as those of a trained one.
            matrix(f"{router_name(layer)}.weight", experts.count, hidden, 2 / hidden**0.5)
            for expert in range(experts.count):
                for projection, sizes in (
                    (4, (width, hidden)),
                    (5, (width, hidden)),
                    (6, (hidden, width)),
                ):
                    name = expert_projection_name(layer, expert, projection)
                    matrix(f"{name}.weight", *sizes, 2 / sizes[1] ** 0.5)
    return weights


def make_adapters(
    sizes: ModelSizes, config: DecoderConfig, dtype: torch.dtype, rng: torch.Generator
) -> list[bytes]:
    """Canonical objects of five adapters with ranks from 1 to 33, on all modules or on some."""
    everywhere = [(layer, p) for layer in range(sizes.layers) for p in config.shape.adapted]
    last = sizes.layers - 1
    patterns: list[Ranks] = [
        dict.fromkeys(everywhere, 3),
        {(layer, p): (20, 5, 16, 1, 9, 20, 8)[p] for layer, p in everywhere},
        {(last, p): 24 for p in (0, 2, 3, 5) if p in config.shape.adapted},
        dict.fromkeys(everywhere, 16),
        {(layer, p): 33 for layer, p in everywhere if p == 1 or layer != last},
    ]
    return [_make_object(config.shape, ranks, dtype, rng) for ranks in patterns]


def make_adapter(shape: ModelShape, rank: int, dtype: torch.dtype, rng: torch.Generator) -> bytes:
    """Canonical object of an adapter with this rank in all modules."""
    places = ((layer, p) for layer in range(shape.num_layers) for p in shape.adapted)
    return _make_object(shape, dict.fromkeys(places, rank), dtype, rng)


def pack_adapter(
    data: bytes, form: PackedForm, folder: Path, shard: Shard = WHOLE
) -> PackedAdapter:
    """Pack a canonical object, and read one shard of it into host memory."""
    digest = hashlib.sha256(data).hexdigest()
    source, target = folder / digest, folder / f"{digest}.{form.form_id[:8]}"
    source.write_bytes(data)
    target.touch()
    pack(source, digest, form, lambda _: target)
    return read_packed(target, digest, form, shard=shard)


def place(
    packed: PackedAdapter, form: PackedForm, slabs: list[int], arena: torch.Tensor
) -> DeviceTables:
    """Copy an adapter into these slabs of a device's arena, and return its tables on the device."""
    packed.copy_to(arena, slabs)
    return DeviceTables.of(
        packed, form.layout, slabs, arena, lambda tensor: tensor.to(arena.device, copy=True)
    )


def _make_object(
    shape: ModelShape, ranks: Ranks, dtype: torch.dtype, rng: torch.Generator
) -> bytes:
    """Canonical object of values that `dtype` can represent, stored as float32. Packing for any
    device rounds them alike.
    """
    names = {projection: name for name, projection in _MODULES.items()}
    tensors: dict[str, np.ndarray] = {}
    scales: dict[str, ModuleScale] = {}
    for (layer, projection), rank in ranks.items():
        module = f"model.layers.{layer}.{names[projection]}"
        inputs, outputs = shape.features(projection)
        a = torch.randn(rank, inputs, generator=rng) / inputs**0.5
        b = torch.randn(outputs, rank, generator=rng) / rank**0.5
        for name, tensor in zip(lora_names(module), (a, b), strict=True):
            tensors[name] = tensor.to(dtype).float().numpy()
        scales[module] = ModuleScale(rank, 0.5 + len(scales) % 3 / 4)
    return _canonical(tensors, scales)


def _canonical(tensors: Mapping[str, np.ndarray], scales: Mapping[str, ModuleScale]) -> bytes:
    infos = {name: TensorInfo("F32", t.shape, 0, t.nbytes) for name, t in tensors.items()}
    header = canonical_header(CanonicalAdapter(dict(scales), infos))
    return header + b"".join(tensors[name].tobytes() for name in sorted(tensors))
