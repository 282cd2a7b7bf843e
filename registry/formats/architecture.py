"""The model architectures that are served: one list for the registry and for the engine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Composite:
    """A class of checkpoints that also take images.

    model_type: in config.json.   text_type: that of the text model, where text_config has none.
    """

    model_type: str
    text_type: str


COMPOSITES = {
    "Gemma3ForConditionalGeneration": Composite("gemma3", "gemma3_text"),
    "Mistral3ForConditionalGeneration": Composite("mistral3", "mistral"),
    "Qwen2_5_VLForConditionalGeneration": Composite("qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": Composite("qwen3_vl", "qwen3_vl_text"),
    "LlavaForConditionalGeneration": Composite("llava", "llama"),
}
"""Classes whose text model is served; see registry.base.text_config."""

_MISSING = {
    "llama4_text": "attention in chunks and experts beside a dense MLP",
    "ministral3": "queries that are scaled by position",
    "qwen3_5_text": "linear attention",
    "qwen3_5_moe_text": "linear attention",
}
"""Features that text models need and that are not served, by `model_type`."""

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
    """The architecture that the config of a text model asks for; None if it is not served."""
    return _class_of(config, ARCHITECTURES)


def composite_class(config: Mapping[str, Any]) -> str | None:
    """The class of COMPOSITES that a config.json asks for; None for others."""
    return _class_of(config, {name: each.model_type for name, each in COMPOSITES.items()})


def _class_of(config: Mapping[str, Any], served: Mapping[str, str]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return next((name for name in names if name in served), None)
    # A folder that was saved from a bare config names only the model type.
    model_type = config.get("model_type")
    return next((name for name, kind in served.items() if kind == model_type), None)


def refusal(config: Mapping[str, Any]) -> str:
    """Reason to give for a config.json whose architecture is not served."""
    found = ascii(config.get("architectures") or config.get("model_type"))
    return (
        f"its architecture is {found}{_text_of(config)}; served are {', '.join(ARCHITECTURES)}, "
        f"and the text models of {', '.join(COMPOSITES)}"
    )


def _text_of(config: Mapping[str, Any]) -> str:
    """A refusal's words on the text model of a checkpoint that takes more than text."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return ", and it has no text_config" if composite_class(config) else ""
    kind = text.get("model_type")
    missing = _MISSING.get(kind) if isinstance(kind, str) else None
    needs = f", which needs {missing}" if missing else ""
    return f" with the text model {ascii(kind)}{needs}"
