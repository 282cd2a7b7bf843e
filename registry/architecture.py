"""The model architectures that are served: one list for the registry and for the engine."""

import re
from collections.abc import Mapping
from typing import Any

# `model_type` by class name, both as in config.json, which lists class names in `architectures`.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}

FUSED_ARCHITECTURES = frozenset({"Phi3ForCausalLM"})
"""Architectures that have q, k and v as one module, and gate and up as one, in checkpoints and in
adapters."""

EXPERT_ARCHITECTURES = frozenset({"Qwen3MoeForCausalLM", "MixtralForCausalLM"})
"""Architectures whose MLPs consist of experts. Adapters may change their attention only."""

_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.model.", "model."),
    ("text_model.", "model."),
)
"""Names of a text model within a checkpoint that also takes images or sound, and its own names."""

_TOWER = re.compile(
    r"(?:^|\.)(?:vision|visual|audio|image|speech|multi_modal|mm_projector|embed_vision|embed_audio)"
)

_OF_MLP = re.compile(r"\.(?:mlp|block_sparse_moe)\.")


def text_name(name: str) -> str | None:
    """Name of a tensor or module in a checkpoint of the text model alone, such as
    "model.layers.0.mlp.up_proj"; None if it belongs to a tower for images or sound.
    """
    if _TOWER.search(name):
        return None
    for theirs, own in _TEXT_PREFIXES:
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def may_change(config: Mapping[str, Any], name: str) -> bool:
    """Whether adapters may change a tensor: in a mixture of experts, none of an MLP."""
    return not (_OF_MLP.search(name) and served_architecture(config) in EXPERT_ARCHITECTURES)


def served_architecture(config: Mapping[str, Any]) -> str | None:
    """The architecture that a config.json asks for; None if it is not served."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return next((name for name in names if name in ARCHITECTURES), None)
    # A folder that was saved from a bare config names only the model type.
    model_type = config.get("model_type")
    return next((name for name, kind in ARCHITECTURES.items() if kind == model_type), None)


def refusal(config: Mapping[str, Any]) -> str:
    """Reason to give for a config.json whose architecture is not served."""
    found = ascii(config.get("architectures") or config.get("model_type"))
    return f"its architecture is {found}; served are {', '.join(ARCHITECTURES)}"
