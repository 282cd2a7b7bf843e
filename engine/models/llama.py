"""The Llama architecture as plain torch, with LoRA applied beside every projection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from engine.inputs import ForwardInputs
from kernels.attention import decode_attention, prefill_attention, store_kv
from kernels.elementwise import apply_rope, is_finite, rms_norm, silu_mul
from lora.layout import PROJECTIONS, ModelShape

_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(len(PROJECTIONS))
_MODULES = (
    *(f"self_attn.{name}" for name in PROJECTIONS[:4]),
    *(f"mlp.{name}" for name in PROJECTIONS[4:]),
)


class UnsupportedModel(Exception):
    """This checkpoint is not what the engine serves; the sentence says what about it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rope_type: default, linear or llama3 (the frequencies' rescaling of Llama 3.1)."""

    theta: float
    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """From either spelling: `rope_parameters` (transformers 5), `rope_theta` and
        `rope_scaling`.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in ("default", "linear", "llama3"):
            raise UnsupportedModel(f"rope_type {rope_type} is not served")
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_type=rope_type,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_max_position_embeddings=int(
                scaling.get("original_max_position_embeddings", 8192)
            ),
        )

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] radians a position, float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.rope_type == "linear":
            return frequencies / self.factor
        return self._llama3(frequencies) if self.rope_type == "llama3" else frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
        turns = self.original_max_position_embeddings * frequencies / (2 * torch.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / self.factor + keep * frequencies


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What the engine reads of a Llama config.json."""

    shape: ModelShape
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Raises UnsupportedModel."""
        if "LlamaForCausalLM" not in config.get("architectures", ()):
            raise UnsupportedModel(f"architectures {config.get('architectures')} is not Llama")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {config['hidden_act']} is not served")
        for bias in ("attention_bias", "mlp_bias"):
            if config.get(bias):
                raise UnsupportedModel(f"{bias} is not served")
        heads = config["num_attention_heads"]
        shape = ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        )
        return cls(
            shape=shape,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=RopeConfig.parse(config),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """input_norm, post_norm: [hidden].   projections: [out, in], as in PROJECTIONS."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    projections: tuple[torch.Tensor, ...]


class Llama:
    """weights: tensors by their Hugging Face names, on the device and in the dtype to compute in.

    Raises UnsupportedModel when one is missing.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, torch.Tensor], max_model_len: int
    ) -> None:
        self.config = config
        try:
            self.embedding = weights["model.embed_tokens.weight"]
            tied = config.tie_word_embeddings
            self.lm_head = self.embedding if tied else weights["lm_head.weight"]
            self.norm = weights["model.norm.weight"]
            self.layers = [
                _Layer(
                    weights[f"model.layers.{i}.input_layernorm.weight"],
                    weights[f"model.layers.{i}.post_attention_layernorm.weight"],
                    tuple(weights[f"model.layers.{i}.{module}.weight"] for module in _MODULES),
                )
                for i in range(config.shape.num_layers)
            ]
        except KeyError as missing:
            raise UnsupportedModel(f"the checkpoint has no tensor {missing}") from None
        angles = torch.outer(
            torch.arange(max_model_len).float(), config.rope.frequencies(config.shape.head_dim)
        )
        self.cos = angles.cos().to(self.embedding)
        self.sin = angles.sin().to(self.embedding)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs: ForwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the tokens in `inputs.logits_indices`, [rows, vocab]; [T] bool, is it finite.

        input_ids, positions: [T] int64.   The KV of all T tokens is written to the arena.
        """
        hidden = self.embedding[input_ids]
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            normed = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            hidden = hidden + self._attention(index, layer, normed, cos, sin, inputs)
            normed = rms_norm(hidden, layer.post_norm, self.config.rms_norm_eps)
            hidden = hidden + self._mlp(index, layer, normed, inputs)
        last = rms_norm(hidden[inputs.logits_indices], self.norm, self.config.rms_norm_eps)
        # Nothing turns a NaN of the residual stream into a number again: the last one tells.
        return linear(last, self.lm_head), is_finite(hidden)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        dim = self.config.shape.head_dim
        q = self._project(index, layer, _Q, x, inputs).view(len(x), -1, dim)
        k = self._project(index, layer, _K, x, inputs).view(len(x), -1, dim)
        v = self._project(index, layer, _V, x, inputs).view(len(x), -1, dim)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        stored = store_kv(inputs.kv, index, k, v, inputs.slot_mapping)
        out = torch.empty_like(q)
        for group in inputs.decodes:
            out[group.rows] = decode_attention(
                q[group.rows], inputs.kv, index, group.blocks, group.seq_lens
            )
        for chunk in inputs.prefills:
            rows = slice(chunk.row, chunk.row + chunk.length)
            out[rows] = prefill_attention(q[rows], inputs.kv, index, chunk.blocks, chunk.start)
        # The cache has zeros where this token's keys or values are not finite: it must not pass.
        out = out.flatten(1).masked_fill(~stored[:, None], torch.nan)
        return self._project(index, layer, _O, out, inputs)

    def _mlp(
        self, index: int, layer: _Layer, x: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        gate = self._project(index, layer, _GATE, x, inputs)
        up = self._project(index, layer, _UP, x, inputs)
        return self._project(index, layer, _DOWN, silu_mul(gate, up), inputs)

    def _project(
        self, index: int, layer: _Layer, projection: int, x: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        y = linear(x, layer.projections[projection])
        inputs.lora.apply(y, x, index, projection)
        return y
