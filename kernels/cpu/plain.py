"""The operations in plain torch: the reference for the other kernels, and the fallback."""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from kernels.attention import prefill_attention, store_kv
from kernels.cpu.interface import AttentionShape, Embedding, Linear
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.elementwise import Activation, apply_rope, gated, rms_norm
from kernels.quantized import Weight, as_numbers
from kernels.work import HeadNorms, Site

_QUERIES = 256
"""Tokens of a row that attend at a time, so that the scores of a long prompt stay small."""


class PlainKernels:
    """`CpuKernels` in plain torch. A KV block is [layer, k or v, kv head, token, head_dim].

    Codes of weights become the numbers that they stand for. A row's bits depend on other rows.
    """

    name = "torch"
    rounds_rows_of: Sequence[int] = ()

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        numbers = as_numbers(weight)
        return lambda x: linear(x, numbers.to(x.dtype), bias)

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        return weight.__getitem__

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
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
        gate, up = gate_up.chunk(2, dim=1)
        return gated(gate, up, activation)

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        outputs = y.split(site.out_features, dim=1)
        for number, (first, end) in enumerate(runs.bounds.tolist()):
            for projection, output in zip(site.projections, outputs, strict=True):
                scale = float(runs.scales[number][site.layer, projection])
                for a, b in runs.tiles(number, site, projection):
                    output[first:end].addmm_(x[first:end] @ a.T, b, alpha=scale)
