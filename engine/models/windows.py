"""Sliding windows by layer, as the families read them from config.json."""

from collections.abc import Sequence

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson

# Defaults of transformers for what config.json leaves out.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_GEMMA3_PATTERN = 6

Windows = tuple[int | None, ...]
"""Numbers of positions that a token sees in each layer, including its own; None if it sees all."""


def all_see_all(config: ConfigJson) -> Windows:
    """Windows of Llama: none, whatever config.json says."""
    num_layers: int = config["num_hidden_layers"]
    return (None,) * num_layers


def all_slide(config: ConfigJson) -> Windows:
    """Windows of Mistral."""
    num_layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    return (window,) * num_layers


def all_slide_if_given(config: ConfigJson) -> Windows:
    """Windows of Phi, which has none by default."""
    return all_slide({"sliding_window": None, **config})


def all_slide_if_used(config: ConfigJson) -> Windows:
    """Windows of Qwen3-MoE: of all layers, if the model uses windows at all."""
    return all_slide(config) if config.get("use_sliding_window") else all_see_all(config)


def some_slide(config: ConfigJson) -> Windows:
    """Windows of a Qwen: of the layers that slide, if the model uses windows at all."""
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    window = window if config.get("use_sliding_window") else None
    return tuple(window if slides else None for slides in _sliding_layers(config))


def _sliding_layers(config: ConfigJson) -> list[bool]:
    if config.get("layer_types") is None:
        first = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return [layer >= first for layer in range(config["num_hidden_layers"])]
    return _sliding_types(config["layer_types"], config["num_hidden_layers"])


def _sliding_types(types: Sequence[str], num_layers: int) -> list[bool]:
    """Whether each layer slides, by layer_types. Raises UnsupportedModel."""
    if other := set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(other)} are not served")
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(types)} layers of {num_layers}")
    return [kind == "sliding_attention" for kind in types]


def _pattern_slides(config: ConfigJson, pattern: int) -> list[bool]:
    """Whether each layer of a Gemma slides: all but each `pattern`-th, if no types are given."""
    num_layers: int = config["num_hidden_layers"]
    if config.get("layer_types") is None:
        return [(layer + 1) % pattern > 0 for layer in range(num_layers)]
    return _sliding_types(config["layer_types"], num_layers)


def gemma2_windows(config: ConfigJson) -> Windows:
    """Windows of Gemma 2: of every second layer, if no types are given."""
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    return tuple(window if slides else None for slides in _pattern_slides(config, 2))


def gemma3_slides(config: ConfigJson) -> list[bool]:
    """Whether each layer of a Gemma 3 slides, which also decides its rope."""
    return _pattern_slides(config, config.get("sliding_window_pattern") or _DEFAULT_GEMMA3_PATTERN)


def gemma3_windows(config: ConfigJson) -> Windows:
    """Windows of Gemma 3: of the layers that slide."""
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    return tuple(window if slides else None for slides in gemma3_slides(config))
