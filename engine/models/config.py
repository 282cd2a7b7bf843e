"""Reads config.json: which model it is, and where the model families differ."""

from dataclasses import dataclass, replace

import torch

from engine.errors import UnsupportedModel
from engine.models.config_json import ConfigJson
from engine.models.experts import LayerExperts
from engine.models.family import (
    FAMILIES,
    Family,
    Multipliers,
    QkNorms,
    Ropes,
    SoftCaps,
)
from engine.models.layer_norms import LayerNorms
from kernels.elementwise import Activation
from lora.layout import ModelShape
from registry.formats.architecture import refusal, served_architecture


@dataclass(frozen=True, slots=True, eq=False)
class DecoderConfig:
    """Configuration of a model of any family: what differs between families is data here.

    shape: sizes that matter to adapters, which change no MLP of a model with experts.
    mlp_width: features between gate and up and down of a dense MLP; 0 if there is none.
    experts: by layer, the experts of its MLP; None if the MLP is dense.
    windows: by layer, how many positions a token sees, including its own; None if it sees all.
    biases: which projections have one, as in PROJECTIONS.
    norms: names of a layer's norms.   qk_norms, has_wide_norms, norm_offset: see Family.

    The decoders keep the residual stream divided by the residual multiplier m: a layer computes
    y + f(norm(y)) in place of x + m * f(norm(x)), with x = m * y. So m costs nothing, and also
    multiplies what adapters add. A norm of y equals that of x if its eps is divided by m * m.
    """

    shape: ModelShape
    mlp_width: int
    experts: LayerExperts
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    ropes: Ropes
    windows: tuple[int | None, ...]
    biases: tuple[bool, ...]
    norms: LayerNorms[str]
    qk_norms: QkNorms | None
    has_wide_norms: bool
    norm_offset: float
    activation: Activation
    multipliers: Multipliers
    soft_caps: SoftCaps

    def features(self, projection: int) -> tuple[int, int]:
        """Numbers of inputs and outputs of a projection of attention, or of a dense MLP.

        projection: its place in PROJECTIONS.
        """
        return replace(self.shape, intermediate_size=self.mlp_width).features(projection)

    @property
    def used_share(self) -> float:
        """Share of a layer's weights that a token computes with, as of its experts."""
        return min(e.per_token / e.count if e else 1.0 for e in self.experts)

    @property
    def longest_of_ropes(self) -> int | None:
        """Length of the longest sequence that all ropes hold for; None without a limit."""
        return min((r.longest for r in self.ropes.different if r.longest is not None), default=None)

    @property
    def qk_norm_sizes(self) -> tuple[int, int] | None:
        """Numbers of features that the norms of q and of k go over; None without norms."""
        shape = self.shape
        if self.qk_norms is None:
            return None
        if self.qk_norms == "heads":
            return shape.head_dim, shape.head_dim
        return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    @property
    def stream_eps(self) -> float:
        """The eps of norms of the residual stream, as the decoders keep it."""
        return self.rms_norm_eps / self.multipliers.residual**2

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """The factor from an embedding to the residual stream, as the decoders keep it."""
        # Models were trained with a multiplier that is rounded to the embedding's dtype.
        multiplier = torch.tensor(self.multipliers.embedding, dtype=dtype).item()
        return multiplier / self.multipliers.residual

    @property
    def sliding_window(self) -> int | None:
        """Most positions that a layer sees; None if one of the layers sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    def at_length(self, max_model_len: int) -> "DecoderConfig":
        """Configuration of a server whose sequences have at most this length; see Rope.at_length.

        Raises UnsupportedModel.
        """
        ropes = tuple(rope.at_length(max_model_len) for rope in self.ropes.different)
        return replace(self, ropes=replace(self.ropes, different=ropes))

    def shard(self, num_shards: int) -> "DecoderConfig":
        """Configuration of the part that one of `num_shards` ranks computes.

        Raises UnsupportedModel if the model cannot be cut into equal parts.
        """
        if self.qk_norms == "projections" and num_shards > 1:
            raise UnsupportedModel(
                f"tensor_parallel_size {num_shards} is not served for this architecture: the norms "
                "of q and k go over the heads of all ranks; take 1"
            )
        parts = {
            "num_key_value_heads": self.shape.num_kv_heads,
            "num_attention_heads": self.shape.num_heads,
            "intermediate_size": self.mlp_width,
        }
        if experts := next(filter(None, self.experts), None):
            parts["width of experts"] = experts.width
        for name, count in parts.items():
            if count % num_shards:
                raise UnsupportedModel(
                    f"tensor_parallel_size {num_shards} does not divide this model's {name} of "
                    f"{count}; take one that does, or 1"
                )
        return replace(
            self,
            shape=self.shape.shard(num_shards),
            mlp_width=self.mlp_width // num_shards,
            experts=tuple(experts and experts.shard(num_shards) for experts in self.experts),
        )

    @classmethod
    def parse(cls, config: ConfigJson) -> "DecoderConfig":
        """Parse a config.json. Raises UnsupportedModel."""
        architecture = served_architecture(config)
        if architecture is None:
            raise UnsupportedModel(refusal(config))
        try:
            return cls._of(FAMILIES[architecture], config)
        except KeyError as missing:
            raise UnsupportedModel(f"config.json has no {missing}") from None

    @classmethod
    def _of(cls, family: Family, config: ConfigJson) -> "DecoderConfig":
        family.check(config)
        experts = family.experts(config)
        mlp_width = 0 if all(experts) else config["intermediate_size"]
        shape = _shape(family, config, 0 if any(experts) else mlp_width)
        return cls(
            shape=shape,
            mlp_width=mlp_width,
            experts=experts,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config.get("rms_norm_eps", family.rms_norm_eps),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", family.is_tied)),
            ropes=family.ropes(config, shape.head_dim, family.rope),
            windows=family.windows(config),
            biases=_biases(family, config),
            norms=family.norms,
            qk_norms=family.qk_norms,
            has_wide_norms=family.has_wide_norms,
            norm_offset=family.norm_offset,
            activation=family.activation(config),
            multipliers=family.multipliers(config),
            soft_caps=family.soft_caps(config),
        )


def _shape(family: Family, config: ConfigJson, intermediate_size: int) -> ModelShape:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or family.head_dim
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=intermediate_size,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or config["hidden_size"] // heads,
    )


def _biases(family: Family, config: ConfigJson) -> tuple[bool, ...]:
    attention = family.reads_attention_bias and bool(config.get("attention_bias"))
    mlp = family.reads_mlp_bias and bool(config.get("mlp_bias"))
    qkv = attention or family.has_qkv_bias
    return (qkv, qkv, qkv, attention, mlp, mlp, mlp)
