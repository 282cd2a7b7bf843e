"""The decoder that Llama, Mistral, Qwen2 and Qwen3 are, with LoRA beside every projection."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from engine.errors import UnsupportedModel
from engine.inputs import ForwardInputs
from engine.models.config import DecoderConfig
from kernels.attention import decode_attention, prefill_attention, store_kv
from kernels.elementwise import apply_rope, is_finite, rms_norm, silu_mul
from lora.layout import PROJECTIONS

_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(len(PROJECTIONS))
_MODULES = (
    *(f"self_attn.{name}" for name in PROJECTIONS[:4]),
    *(f"mlp.{name}" for name in PROJECTIONS[4:]),
)
# Old checkpoints carry the rope's frequencies along.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class _Layer:
    """input_norm, post_norm: [hidden].   q_norm, k_norm: [head_dim].

    projections: [out, in], biases: [out], as in PROJECTIONS.   window: see DecoderConfig.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    projections: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    window: int | None


class Decoder:
    """weights: tensors by their Hugging Face names, on the device and in the dtype to compute in.

    Raises UnsupportedModel when one is missing, has another shape, or has no meaning here.
    """

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, torch.Tensor], max_model_len: int
    ) -> None:
        self.config = config
        checkpoint = _Checkpoint(weights)
        vocabulary = (config.vocab_size, config.shape.hidden_size)
        self.embedding = checkpoint.take("model.embed_tokens.weight", *vocabulary)
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else checkpoint.take("lm_head.weight", *vocabulary)
        self.norm = checkpoint.take("model.norm.weight", config.shape.hidden_size)
        self.layers = [
            _take_layer(config, index, checkpoint) for index in range(config.shape.num_layers)
        ]
        checkpoint.refuse_leftovers()
        cos, sin = config.rope.tables(max_model_len)
        self.cos, self.sin = cos.to(self.embedding), sin.to(self.embedding)

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
        q = apply_rope(self._heads(index, layer, _Q, layer.q_norm, x, inputs), cos, sin)
        k = apply_rope(self._heads(index, layer, _K, layer.k_norm, x, inputs), cos, sin)
        v = self._heads(index, layer, _V, None, x, inputs)
        stored = store_kv(inputs.kv, index, k, v, inputs.slot_mapping)
        out = self._attend(index, layer.window, q, inputs)
        # The cache has zeros where this token's keys or values are not finite: it must not pass.
        out = out.flatten(1).masked_fill(~stored[:, None], torch.nan)
        return self._project(index, layer, _O, out, inputs)

    def _heads(
        self,
        index: int,
        layer: _Layer,
        projection: int,
        norm: torch.Tensor | None,
        x: torch.Tensor,
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        """A projection by heads, normalised where the family does; [T, heads, head_dim]."""
        projected = self._project(index, layer, projection, x, inputs)
        heads = projected.view(len(x), -1, self.config.shape.head_dim)
        return heads if norm is None else rms_norm(heads, norm, self.config.rms_norm_eps)

    def _attend(
        self, index: int, window: int | None, q: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in inputs.decodes:
            out[group.rows] = decode_attention(
                q[group.rows], inputs.kv, index, group.blocks, group.seq_lens, window
            )
        for chunk in inputs.prefills:
            rows = slice(chunk.row, chunk.row + chunk.length)
            out[rows] = prefill_attention(
                q[rows], inputs.kv, index, chunk.blocks, chunk.start, window
            )
        return out

    def _mlp(
        self, index: int, layer: _Layer, x: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        gate = self._project(index, layer, _GATE, x, inputs)
        up = self._project(index, layer, _UP, x, inputs)
        return self._project(index, layer, _DOWN, silu_mul(gate, up), inputs)

    def _project(
        self, index: int, layer: _Layer, projection: int, x: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        y = linear(x, layer.projections[projection], layer.biases[projection])
        inputs.lora.apply(y, x, index, projection)
        return y


class _Checkpoint:
    """Tensors by name, each taken once: what is left over would have changed the answer."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.left = dict(weights)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.left:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        tensor = self.left.pop(name)
        if tensor.shape != shape:
            raise UnsupportedModel(
                f"the tensor {name} is {list(tensor.shape)}, by config.json it is {list(shape)}"
            )
        return tensor

    def refuse_leftovers(self) -> None:
        for name in self.left:
            if name.startswith("model.") and not name.endswith(_COMPUTED):
                raise UnsupportedModel(f"the tensor {name} has no place in this architecture")


def _take_layer(config: DecoderConfig, index: int, checkpoint: _Checkpoint) -> _Layer:
    shape, prefix = config.shape, f"model.layers.{index}"

    def head_norm(name: str) -> torch.Tensor | None:
        if not config.has_head_norms:
            return None
        return checkpoint.take(f"{prefix}.self_attn.{name}.weight", shape.head_dim)

    features = [shape.features(projection) for projection in range(len(PROJECTIONS))]
    return _Layer(
        input_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", shape.hidden_size),
        post_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", shape.hidden_size),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        projections=tuple(
            checkpoint.take(f"{prefix}.{module}.weight", out_features, in_features)
            for module, (in_features, out_features) in zip(_MODULES, features, strict=True)
        ),
        biases=tuple(
            checkpoint.take(f"{prefix}.{module}.bias", out_features) if has_bias else None
            for module, (_, out_features), has_bias in zip(
                _MODULES, features, config.biases, strict=True
            )
        ),
        window=config.windows[index],
    )
