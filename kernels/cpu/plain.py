"""The operations of a step on a CPU, in plain torch: a reference for those in C, and a fallback."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels.attention import prefill_attention, store_kv
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.elementwise import Activation, apply_rope, gated, rms_norm
from kernels.quantized import Weight, as_numbers
from kernels.work import HeadNorms, Site

_QUERIES = 256
"""Tokens of a row that attend at a time, so that the scores of a long prompt stay small."""

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x: [T, in] -> x @ weight.T + bias, [T, out], newly allocated."""

Embedding = Callable[[torch.Tensor], torch.Tensor]
"""ids: [T] int64 -> their rows of the weight, [T, hidden], newly allocated."""


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """Shape of a model's attention, which is the same in all layers.

    cos, sin: [ropes, positions, dim / 2], in the dtype of the hidden states; the first `dim`
    features of a head are rotated.
    block_size: tokens of a KV block.   scale: factor of the products of queries and keys; None for
    1 / sqrt(head_dim).   softcap: bound of the scores, see `kernels.elementwise.soft_cap_`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float | None = None
    softcap: float | None = None


class CpuKernels:
    """The operations, as others may compute them with results that agree to rounding.

    name: for the log.   rounds_rows_of: bits of the codes before whose products rows are rounded.

    Here a KV block is [layer, k or v, kv head, token, head_dim], and codes of weights become the
    numbers that they stand for. A row's bits depend on other rows.
    """

    name = "torch"
    rounds_rows_of: Sequence[int] = ()

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Make a layer.   weight: [out, in], bias: [out]; the caller need not keep them."""
        numbers = as_numbers(weight)
        return lambda x: linear(x, numbers.to(x.dtype), bias)

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        """Make an embedding.   weight: [vocab, hidden]; the caller need not keep it.

        tied_head: the `linear` of the same weight, if that is also the model's head.
        """
        return weight.__getitem__

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """weight * x / rms(x), computed in float32.   x: [T, hidden].   weight: [hidden].

        delta: is added to x first, in place.
        """
        return rms_norm(x if delta is None else x.add_(delta), weight, eps)

    def attention(
        self,
        qkv: torch.Tensor,
        layer: int,
        work: StepWork,
        norms: HeadNorms | None = None,
        window: int | None = None,
        rope: int = 0,
    ) -> torch.Tensor:
        """Compute attended values from projections: head norms, rotary embedding, KV writes,
        attention.

        qkv: [T, (heads + 2 * kv heads) * head_dim], which may be overwritten.   window: how many
        positions a token sees, including its own; None for all.   rope: the layer's among those of
        the shape.   Result: [T, heads * head_dim].
        For a token whose keys or values are not finite, zeros go to the cache and the result is
        NaN. A stored NaN would spoil the results of every later owner of the block even under a
        mask, since 0 * NaN is NaN.
        """
        shape = self.shape
        num_q, num_kv = shape.num_heads, shape.num_kv_heads
        # The arena as KV: [blocks, layers, 2, kv heads, block_size, head_dim].
        kv = work.kv.unflatten(1, (-1, 2, num_kv, shape.block_size, shape.head_dim))
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        turn = shape.cos[rope, work.positions], shape.sin[rope, work.positions]
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
        stored = store_kv(kv, layer, k, v, work.slots)
        out = torch.empty_like(q)
        starts, blocks = work.query_starts.tolist(), work.block_starts.tolist()
        for row, length in enumerate(work.seq_lens.tolist()):
            table = work.blocks[blocks[row] : blocks[row + 1]].tolist()
            for first in range(starts[row], starts[row + 1], _QUERIES):
                end = min(first + _QUERIES, starts[row + 1])
                position = length - starts[row + 1] + first
                seen = table[: -(-(position + end - first) // shape.block_size)]
                out[first:end] = prefill_attention(
                    q[first:end], kv, layer, seen, position, window, shape.scale, shape.softcap
                )
        return out.flatten(1).masked_fill_(~stored[:, None], torch.nan)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See kernels.elementwise.gated.   gate_up: [T, 2 * intermediate], side by side."""
        gate, up = gate_up.chunk(2, dim=1)
        return gated(gate, up, activation)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        """y[t] += scale * B @ A @ x[t] for the site's projections and the tokens of each run.

        y: [T, sum of out], changed in place; other tokens' rows are not touched. It may be columns
        of a larger tensor.   x: [T, in].
        """
        outputs = y.split(site.out_features, dim=1)
        for number, (first, end) in enumerate(runs.bounds.tolist()):
            for projection, output in zip(site.projections, outputs, strict=True):
                scale = float(runs.scales[number][site.layer, projection])
                for a, b in runs.tiles(number, site, projection):
                    output[first:end].addmm_(x[first:end] @ a.T, b, alpha=scale)
