"""The table of model families: what each architecture reads from config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.layer_norms import LayerNorms
from engine.models.rope import RopeRules

# Defaults of transformers for what config.json leaves out.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

Windows = tuple[int | None, ...]
"""Numbers of positions that a token sees in each layer, including its own; None if it sees all."""

QkNorms = Literal["heads", "projections"]
"""The extent of an RMSNorm of q and of k: each head alone, or all heads together."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors in a family's formulas; families without such a factor have 1.

    embedding: factor of the embedding.   residual: of what attention and MLP add to the residual
    stream.   logits: of the logits.   attention: of the products of queries and keys; None stands
    for 1 / sqrt(head_dim).
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None


def _all_see_all(config: ConfigJson) -> Windows:
    num_layers: int = config["num_hidden_layers"]
    return (None,) * num_layers


def _all_slide(config: ConfigJson) -> Windows:
    num_layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    return (window,) * num_layers


def _all_slide_if_given(config: ConfigJson) -> Windows:
    return _all_slide({"sliding_window": None, **config})


def _some_slide(config: ConfigJson) -> Windows:
    """Windows of a Qwen: of the layers that slide, if the model uses windows at all."""
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    window = window if config.get("use_sliding_window") else None
    return tuple(window if slides else None for slides in _sliding_layers(config))


def _sliding_layers(config: ConfigJson) -> list[bool]:
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return [layer >= first for layer in range(num_layers)]
    if other := set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(other)} are not served")
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(types)} layers of {num_layers}")
    return [kind == "sliding_attention" for kind in types]


def _no_multipliers(config: ConfigJson) -> Multipliers:
    return Multipliers()


def _granite_multipliers(config: ConfigJson) -> Multipliers:
    return Multipliers(
        embedding=float(config.get("embedding_multiplier", 1.0)),
        residual=float(config.get("residual_multiplier", 1.0)),
        logits=1.0 / config.get("logits_scaling", 1.0),
        attention=float(config.get("attention_multiplier", 1.0)),
    )


_NORMS_BEFORE = LayerNorms(
    before_attention="input_layernorm", before_mlp="post_attention_layernorm"
)
_NORMS_AFTER = LayerNorms(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that the models of one architecture have in common.

    windows, multipliers: how they follow from config.json.
    has_qkv_bias: whether q, k and v always have a bias.
    reads_attention_bias, reads_mlp_bias: whether config.json says if these have biases.
    rope: rules by which its settings are read.
    norms: their names in a layer.   qk_norms: norms of q and k, None without.
    has_wide_norms: whether norms round only their product with the weight, and not the quotient
    before it.
    head_dim, rms_norm_eps: defaults where config.json has none; a head_dim of None stands for
    hidden_size / heads.
    """

    windows: Callable[[ConfigJson], Windows] = _all_see_all
    multipliers: Callable[[ConfigJson], Multipliers] = _no_multipliers
    has_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    rope: RopeRules = RopeRules()
    norms: LayerNorms[str] = _NORMS_BEFORE
    qk_norms: QkNorms | None = None
    has_wide_norms: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6


FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(windows=_all_slide),
    "Qwen2ForCausalLM": Family(windows=_some_slide, has_qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        windows=_some_slide, reads_attention_bias=True, qk_norms="heads", head_dim=128
    ),
    "GraniteForCausalLM": Family(
        multipliers=_granite_multipliers, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "Olmo2ForCausalLM": Family(
        reads_attention_bias=True,
        norms=_NORMS_AFTER,
        qk_norms="projections",
        has_wide_norms=True,
        rms_norm_eps=1e-5,
    ),
    "Phi3ForCausalLM": Family(
        windows=_all_slide_if_given,
        rope=RopeRules(
            is_partial=True,
            aliases={"su": "longrope", "yarn": "longrope"},
            original_length=4096,
        ),
        rms_norm_eps=1e-5,
    ),
}
"""Families by the architectures of registry.architecture."""
