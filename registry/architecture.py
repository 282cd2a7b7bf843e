"""The model architectures that are served: one list for the registry and for the engine."""

from collections.abc import Mapping
from typing import Any

# By class name, as config.json's `architectures` has it, with its `model_type`.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def served_architecture(config: Mapping[str, Any]) -> str | None:
    """The architecture that a config.json asks for, None when it is not served."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return next((name for name in names if name in ARCHITECTURES), None)
    # Folders written from a bare config name only the model type.
    model_type = config.get("model_type")
    return next((name for name, kind in ARCHITECTURES.items() if kind == model_type), None)


def refusal(config: Mapping[str, Any]) -> str:
    """What to say of one that is not."""
    found = ascii(config.get("architectures") or config.get("model_type"))
    return f"its architecture is {found}, served are {', '.join(ARCHITECTURES)}"
