"""Reads config.json: which model it is, and where the model families differ."""

from dataclasses import dataclass, replace

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.rope import Rope
from lora.layout import ModelShape
from registry.architecture import refusal, served_architecture

# Defaults of transformers for what config.json leaves out.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, eq=False)
class DecoderConfig:
    """Configuration of a Llama, Mistral, Qwen2 or Qwen3.

    windows: by layer, how many positions a token sees, including its own; None if it sees all.
    biases: which projections have one, as in PROJECTIONS.
    has_head_norms: whether every head of q and k has an RMSNorm.
    """

    shape: ModelShape
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
    windows: tuple[int | None, ...]
    biases: tuple[bool, ...]
    has_head_norms: bool

    @property
    def sliding_window(self) -> int | None:
        """Most positions that a layer sees; None if one of the layers sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    def shard(self, num_shards: int) -> "DecoderConfig":
        """Configuration of the part that one of `num_shards` ranks computes.

        Raises UnsupportedModel if the model cannot be cut into equal parts.
        """
        parts = {
            "num_key_value_heads": self.shape.num_kv_heads,
            "num_attention_heads": self.shape.num_heads,
            "intermediate_size": self.shape.intermediate_size,
        }
        for name, count in parts.items():
            if count % num_shards:
                raise UnsupportedModel(
                    f"tensor_parallel_size {num_shards} does not divide this model's {name} of "
                    f"{count}; take one that does, or 1"
                )
        return replace(self, shape=self.shape.shard(num_shards))

    @classmethod
    def parse(cls, config: ConfigJson) -> "DecoderConfig":
        """Parse a config.json. Raises UnsupportedModel."""
        architecture = served_architecture(config)
        if architecture is None:
            raise UnsupportedModel(refusal(config))
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {config['hidden_act']} is not served")
        try:
            return cls._of(architecture, config)
        except KeyError as missing:
            raise UnsupportedModel(f"config.json has no {missing}") from None

    @classmethod
    def _of(cls, architecture: str, config: ConfigJson) -> "DecoderConfig":
        shape = _shape(architecture, config)
        return cls(
            shape=shape,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=Rope.parse(config, shape.head_dim),
            windows=_windows(architecture, config),
            biases=_biases(architecture, config),
            has_head_norms=architecture == "Qwen3ForCausalLM",
        )


def _shape(architecture: str, config: ConfigJson) -> ModelShape:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None and architecture == "Qwen3ForCausalLM":
        head_dim = _DEFAULT_QWEN3_HEAD_DIM
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or config["hidden_size"] // heads,
    )


def _windows(architecture: str, config: ConfigJson) -> tuple[int | None, ...]:
    num_layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window", _DEFAULT_WINDOW)
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    window = window if config.get("use_sliding_window") else None
    windows = tuple(window if slides else None for slides in _sliding_layers(config))
    if len(windows) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(windows)} layers of {num_layers}")
    return windows


def _sliding_layers(config: ConfigJson) -> list[bool]:
    """Whether each layer of a Qwen has a sliding window, if the model uses one at all."""
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return [layer >= first for layer in range(config["num_hidden_layers"])]
    if other := set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(other)} are not served")
    return [kind == "sliding_attention" for kind in types]


def _biases(architecture: str, config: ConfigJson) -> tuple[bool, ...]:
    reads_config = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention = reads_config and bool(config.get("attention_bias"))
    mlp = architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias"))
    qkv = attention or architecture == "Qwen2ForCausalLM"
    return (qkv, qkv, qkv, attention, mlp, mlp, mlp)
