"""The table of model families: what each architecture reads from config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson, none_by_layer
from engine.models.experts import LayerExperts, mixtral_experts, qwen3_moe_experts
from engine.models.layer_norms import LayerNorms
from engine.models.rope import Rope, RopeRules
from engine.models.windows import (
    Windows,
    all_slide,
    all_slide_if_given,
    all_slide_if_used,
    gemma2_windows,
    gemma3_slides,
    gemma3_windows,
    some_slide,
)
from kernels.elementwise import Activation

# Defaults of transformers for what config.json leaves out.
_DEFAULT_GEMMA3_THETAS = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
_DEFAULT_QUERY_SCALAR = 256

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


@dataclass(frozen=True, slots=True)
class SoftCaps:
    """Bounds c of scores and of logits, which become c * tanh(x / c); None without a bound."""

    attention: float | None = None
    logits: float | None = None


_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Ropes:
    """The different rotary embeddings of a model, and by layer the number of its own."""

    different: tuple[Rope, ...]
    numbers: tuple[int, ...]


def _one_rope(config: ConfigJson, head_dim: int, rules: RopeRules) -> Ropes:
    return Ropes((Rope.parse(config, head_dim, rules),), (0,) * config["num_hidden_layers"])


def _gemma3_ropes(config: ConfigJson, head_dim: int, rules: RopeRules) -> Ropes:
    """Ropes of layers that slide (0) and of layers that see all (1), in either spelling."""
    by_type = config.get("rope_parameters") or {}
    if other := set(by_type) - set(_DEFAULT_GEMMA3_THETAS):
        raise UnsupportedModel(f"rope_parameters of {sorted(other)} are not served")
    thetas = {
        "sliding_attention": config.get("rope_local_base_freq"),
        "full_attention": config.get("rope_theta"),
    }
    scalings = {"full_attention": config.get("rope_scaling") or {}}
    ropes = []
    for kind, default in _DEFAULT_GEMMA3_THETAS.items():
        theta = {"rope_theta": thetas[kind] or default}
        given = theta | (by_type.get(kind) or {}) | scalings.get(kind, {})
        longest = {"max_position_embeddings": config["max_position_embeddings"]}
        ropes.append(Rope.parse({"rope_parameters": given, **longest}, head_dim, rules))
    return Ropes(tuple(ropes), tuple(0 if slides else 1 for slides in gemma3_slides(config)))


def _gemma2_soft_caps(config: ConfigJson) -> SoftCaps:
    return SoftCaps(
        config.get("attn_logit_softcapping", 50.0), config.get("final_logit_softcapping", 30.0)
    )


def _gemma3_soft_caps(config: ConfigJson) -> SoftCaps:
    return SoftCaps(logits=config.get("final_logit_softcapping"))


def _gemma_multipliers(config: ConfigJson) -> Multipliers:
    scalar = config.get("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR)
    return Multipliers(embedding=config["hidden_size"] ** 0.5, attention=scalar**-0.5)


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
_NORMS_AROUND = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that the models of one architecture have in common.

    windows, ropes, experts, multipliers, soft_caps: how they follow from config.json.
    activation_setting: name of the setting for the activation.
    has_qkv_bias: whether q, k and v always have a bias.
    reads_attention_bias, reads_mlp_bias: whether config.json says if these have biases.
    rope: rules by which settings of a rope are read.
    norms: their names in a layer.   qk_norms: norms of q and k, None without.
    has_wide_norms: whether norms round only their product with the weight, and not the quotient
    before it.   norm_offset: a norm multiplies by its weight and this number.
    head_dim, rms_norm_eps, is_tied: defaults where config.json has none; a head_dim of None stands
    for hidden_size / heads.   refused: settings that must not be given.
    """

    windows: Callable[[ConfigJson], Windows] = none_by_layer
    ropes: Callable[[ConfigJson, int, RopeRules], Ropes] = _one_rope
    experts: Callable[[ConfigJson], LayerExperts] = none_by_layer
    multipliers: Callable[[ConfigJson], Multipliers] = lambda _: Multipliers()
    soft_caps: Callable[[ConfigJson], SoftCaps] = lambda _: SoftCaps()
    activation_setting: str = "hidden_act"
    default_activation: str = "silu"
    has_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    rope: RopeRules = RopeRules()
    norms: LayerNorms[str] = _NORMS_BEFORE
    qk_norms: QkNorms | None = None
    has_wide_norms: bool = False
    norm_offset: float = 0.0
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    is_tied: bool = False
    refused: tuple[str, ...] = ()

    def check(self, config: ConfigJson) -> None:
        """Raise UnsupportedModel if a setting has a value that is not served."""
        for name in self.refused:
            if config.get(name):
                raise UnsupportedModel(f"{name} {config[name]} is not served")

    def activation(self, config: ConfigJson) -> Activation:
        """The activation that config.json names. Raises UnsupportedModel."""
        name = config.get(self.activation_setting) or self.default_activation
        if name not in _ACTIVATIONS:
            raise UnsupportedModel(f"{self.activation_setting} {name} is not served")
        return _ACTIVATIONS[name]


_GEMMA2 = Family(
    windows=gemma2_windows,
    multipliers=_gemma_multipliers,
    soft_caps=_gemma2_soft_caps,
    activation_setting="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    reads_attention_bias=True,
    norms=_NORMS_AROUND,
    has_wide_norms=True,
    norm_offset=1.0,
    head_dim=256,
    is_tied=True,
    refused=("use_bidirectional_attention",),
)
_GEMMA3 = replace(
    _GEMMA2,
    windows=gemma3_windows,
    ropes=_gemma3_ropes,
    soft_caps=_gemma3_soft_caps,
    qk_norms="heads",
    # Gemma 3 has the setting for scores, and no code of transformers follows it.
    refused=("use_bidirectional_attention", "attn_logit_softcapping"),
)

FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(windows=all_slide),
    "Qwen2ForCausalLM": Family(windows=some_slide, has_qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        windows=some_slide, reads_attention_bias=True, qk_norms="heads", head_dim=128
    ),
    "Qwen3MoeForCausalLM": Family(
        windows=all_slide_if_used,
        experts=qwen3_moe_experts,
        reads_attention_bias=True,
        qk_norms="heads",
    ),
    "MixtralForCausalLM": Family(
        windows=all_slide_if_given,
        experts=mixtral_experts,
        rope=RopeRules(theta=1_000_000.0),
        rms_norm_eps=1e-5,
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
        windows=all_slide_if_given,
        rope=RopeRules(
            is_partial=True,
            aliases={"su": "longrope", "yarn": "longrope"},
            original_length=4096,
        ),
        rms_norm_eps=1e-5,
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
}
"""Families by the architectures of registry.formats.architecture."""
