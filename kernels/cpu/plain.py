"""The operations in plain torch: the reference for the other kernels, and the last fallback."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import attention
from kernels.attention import store_kv
from kernels.cpu import tiled_attention
from kernels.cpu.interface import AttentionShape, Embedding, Linear
from kernels.cpu.linear import MakeLinear, plain
from kernels.cpu.tile_views import TileViews
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.elementwise import apply_rope, gelu_mul, rms_norm, silu_mul
from kernels.lora import add_lora, add_lora_by_tiles
from kernels.work import HeadNorms, Site

_DECODE_GROUP = 8
"""Decodes that share one padded gather. They are sorted by length, so there is little padding.

Groups of 8 are the best pure-torch variant of those tried: 157 ms against 247 unsorted (135M shape,
32 rows, one thread).
"""


_GELU_FACTOR, _GELU_CUBIC = 2 * (2 / math.pi) ** 0.5, 0.044715


class PlainKernels:
    """`CpuKernels` in plain torch. A KV block is [layer, k or v, kv head, token, head_dim].

    linear: makes the linear layers.   is_invariant: a row's bits depend on the row only, if the
    bits of the linear layers do.
    """

    name = "torch"

    def __init__(
        self, shape: AttentionShape, linear: MakeLinear = plain, *, is_invariant: bool = False
    ) -> None:
        self.shape = shape
        self.linear = linear
        self.rounds_rows_of: Sequence[int] = () if linear is plain else (8,)
        self.is_invariant = is_invariant
        self._attention = tiled_attention if is_invariant else attention
        self._add_lora = add_lora_by_tiles if is_invariant else add_lora
        self._planned: tuple[StepWork, _Plan] | None = None
        self._tiles = TileViews()

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        return weight.__getitem__

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return rms_norm(x.add_(delta), weight, eps)

    def attention(
        self,
        qkv: torch.Tensor,
        layer: int,
        work: StepWork,
        norms: HeadNorms | None = None,
        window: int | None = None,
        rope: int = 0,
    ) -> torch.Tensor:
        shape, kv = self.shape, self._kv(work)
        num_q, num_kv = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        plan = self._plan(work)
        turn = plan.cos[rope], plan.sin[rope]
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
        scores = window, shape.scale, shape.softcap
        stored = store_kv(kv, layer, k, v, work.slots)
        out = torch.empty_like(q)
        for group in plan.decodes:
            out[group.tokens] = self._attention.decode_attention(
                q[group.tokens], kv, layer, group.blocks, group.seq_lens, *scores
            )
        for chunk in plan.prefills:
            tokens = slice(chunk.first, chunk.end)
            out[tokens] = self._attention.prefill_attention(
                q[tokens], kv, layer, chunk.blocks, chunk.start, *scores
            )
        return out.flatten(1).masked_fill_(~stored[:, None], torch.nan)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        # torch's silu uses another exp for the elements after the last whole vector, and which
        # ones these are depends on the numbers of rows and threads. torch.exp has no such case.
        return gate / (1 + torch.exp(-gate)) * up if self.is_invariant else silu_mul(gate, up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        if not self.is_invariant:
            return gelu_mul(gate, up)
        # (1 + tanh(x)) / 2 is 1 / (1 + exp(-2 x)); why not torch's own function: see silu_mul.
        z = _GELU_FACTOR * gate * (1 + _GELU_CUBIC * gate * gate)
        return gate / (1 + torch.exp(-z)) * up

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        outputs = y.split(site.out_features, dim=1)
        for number, (first, end) in enumerate(runs.bounds.tolist()):
            scales = runs.scales[number][site.layer].tolist()
            for projection, output in zip(site.projections, outputs, strict=True):
                if tiles := self._tiles.of(runs, number, site, projection):
                    self._add_lora(output[first:end], x[first:end], tiles, scales[projection])

    def _kv(self, work: StepWork) -> torch.Tensor:
        """The arena as KV: [blocks, layers, 2, kv heads, block_size, head_dim]."""
        shape = self.shape
        block = (-1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        return work.kv.unflatten(1, block)

    def _plan(self, work: StepWork) -> "_Plan":
        if self._planned is None or self._planned[0] is not work:
            self._planned = (work, _Plan.of(work, self.shape))
        return self._planned[1]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decodes that are computed together, by one gather of their KV.

    tokens, seq_lens: [B] int64.   blocks: [B, blocks] int64.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Tokens [first, end) are positions start, start + 1, ... of one sequence."""

    first: int
    end: int
    start: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Data that all layers of a step share.   cos, sin: [ropes, T, dim / 2], of its tokens."""

    decodes: list[_Decodes]
    prefills: list[_Prefill]
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, work: StepWork, shape: AttentionShape) -> "_Plan":
        starts, lens = work.query_starts.tolist(), work.seq_lens.tolist()
        block_starts, blocks = work.block_starts.tolist(), work.blocks.tolist()
        rows = [
            _Prefill(first, end, length - (end - first), blocks[low:high])
            for first, end, length, low, high in zip(
                starts, starts[1:], lens, block_starts, block_starts[1:], strict=False
            )
        ]
        decodes = sorted((row for row in rows if row.end - row.first == 1), key=lambda r: r.start)
        groups = [decodes[i : i + _DECODE_GROUP] for i in range(0, len(decodes), _DECODE_GROUP)]
        prefills = [row for row in rows if row.end - row.first > 1]
        cos, sin = shape.cos[:, work.positions], shape.sin[:, work.positions]
        return cls([_group(rows) for rows in groups], prefills, cos, sin)


def _group(rows: list[_Prefill]) -> _Decodes:
    depth = max(len(row.blocks) for row in rows)
    # A row is padded with its own last block, so that it reads no other row's memory, even masked.
    blocks = [(row.blocks + row.blocks[-1:] * depth)[:depth] for row in rows]
    return _Decodes(
        tokens=torch.tensor([row.first for row in rows]),
        blocks=torch.tensor(blocks),
        seq_lens=torch.tensor([row.start + 1 for row in rows]),
    )
