"""The decoder that Llama, Mistral, Qwen2 and Qwen3 are, with LoRA beside every projection."""

from collections.abc import Mapping

import torch
from torch.nn.functional import linear

from engine.inputs import ForwardInputs
from engine.models.checkpoint import Checkpoint, LayerWeights
from engine.models.config import DecoderConfig
from kernels.attention import decode_attention, prefill_attention, store_kv
from kernels.elementwise import apply_rope, is_finite, rms_norm, silu_mul
from lora.layout import PROJECTIONS

_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(len(PROJECTIONS))


class Decoder:
    """weights: tensors by their Hugging Face names, on the device and in the dtype to compute in.

    Raises UnsupportedModel where Checkpoint does.
    """

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, torch.Tensor], max_model_len: int
    ) -> None:
        self.config = config
        checkpoint = Checkpoint(config, weights)
        self.embedding, self.lm_head = checkpoint.embedding, checkpoint.lm_head
        self.norm, self.layers = checkpoint.norm, checkpoint.layers
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
        layer: LayerWeights,
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
        layer: LayerWeights,
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
        self, index: int, layer: LayerWeights, x: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        gate = self._project(index, layer, _GATE, x, inputs)
        up = self._project(index, layer, _UP, x, inputs)
        return self._project(index, layer, _DOWN, silu_mul(gate, up), inputs)

    def _project(
        self,
        index: int,
        layer: LayerWeights,
        projection: int,
        x: torch.Tensor,
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        y = linear(x, layer.projections[projection], layer.biases[projection])
        inputs.lora.apply(y, x, index, projection)
        return y
