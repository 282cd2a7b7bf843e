"""Sliding windows by layer, as the families read them from config.json."""

from collections.abc import Callable, Sequence

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson

# Defaults of transformers for what config.json leaves out.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_GEMMA3_PATTERN = 6

Windows = tuple[int | None, ...]
"""Numbers of positions that a token sees in each layer, including its own; None if it sees all."""


def all_slide(config: ConfigJson) -> Windows:
    """Windows of Mistral."""
    return _windows(config, [True] * config["num_hidden_layers"])


def all_slide_if_given(config: ConfigJson) -> Windows:
    """Windows of Phi, which has none by default."""
    return all_slide({"sliding_window": None, **config})


def all_slide_if_used(config: ConfigJson) -> Windows:
    """Windows of Qwen3-MoE: of all layers, if the model uses windows at all."""
    return all_slide(_if_used(config))


def some_slide(config: ConfigJson) -> Windows:
    """Windows of a Qwen: of the layers that slide, if the model uses windows at all."""
    first = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    return _windows(_if_used(config), _slides(config, lambda layer: layer >= first))


def gemma2_windows(config: ConfigJson) -> Windows:
    """Windows of Gemma 2: of every second layer, if no types are given."""
    return _windows(config, _slides(config, lambda layer: layer % 2 == 0))


def gemma3_slides(config: ConfigJson) -> list[bool]:
    """Whether each layer of a Gemma 3 slides, which also decides its rope: all but each sixth, or
    of another pattern, if no types are given.
    """
    pattern = config.get("sliding_window_pattern") or _DEFAULT_GEMMA3_PATTERN
    return _slides(config, lambda layer: (layer + 1) % pattern > 0)


def gemma3_windows(config: ConfigJson) -> Windows:
    """Windows of Gemma 3: of the layers that slide."""
    return _windows(config, gemma3_slides(config))


def _if_used(config: ConfigJson) -> ConfigJson:
    """The settings, without a window unless the model uses windows."""
    return config if config.get("use_sliding_window") else {**config, "sliding_window": None}


def _windows(config: ConfigJson, slides: Sequence[bool]) -> Windows:
    """The model's window for each layer that slides.   slides: whether each layer does."""
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    return tuple(window if is_sliding else None for is_sliding in slides)


def _slides(config: ConfigJson, rule: Callable[[int], bool]) -> list[bool]:
    """Whether each layer slides, by layer_types, or else by a rule for its number.

    Raises UnsupportedModel.
    """
    types, num_layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return [rule(layer) for layer in range(num_layers)]
    if other := set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(other)} are not served")
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(types)} layers of {num_layers}")
    return [kind == "sliding_attention" for kind in types]
