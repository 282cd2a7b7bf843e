"""Sequences in memory whose blocks CPU kernels lay out as they like, and the formulas."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.plain import AttentionShape, CpuKernels
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.work import HeadNorms
from tests.kernels.lora_cases import LoRACase

LAYERS, LAYER = 2, 1
_SPARE = 3

Part = tuple[int, int, int]
"""(sequence, first position, end): the positions of a sequence that a step computes."""


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_shape(
    heads: int, kv_heads: int, dim: int, block_size: int = 16, rotary_dim: int | None = None
) -> AttentionShape:
    waves = torch.arange(0, rotary_dim or dim, 2) / dim
    angles = torch.outer(torch.arange(512.0), 10000.0**-waves)
    return AttentionShape(heads, kv_heads, dim, block_size, angles.cos()[None], angles.sin()[None])


def make_norms(dim: int) -> HeadNorms:
    return HeadNorms(1 + randn(dim, seed=2) / 4, 1 + randn(dim, seed=3) / 4, 1e-5)


class Sequences:
    """Sequences of these lengths in blocks at scattered slabs.

    qkv: projections of all tokens of each sequence; they depend on its length only.
    garbage: the number that fills all other memory.
    """

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], garbage: float) -> None:
        self.shape = shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = [randn(length, width, seed=length) for length in lengths]
        depths = [-(-length // shape.block_size) for length in lengths]
        slabs = sum(depths) + _SPARE
        elements = LAYERS * 2 * shape.num_kv_heads * shape.block_size * shape.head_dim
        self.memory = torch.full((slabs, elements + 64), garbage)
        self.kv = self.memory[:, :elements]
        order = torch.randperm(slabs, generator=torch.Generator().manual_seed(slabs)).tolist()
        self.tables = [[order.pop() for _ in range(depth)] for depth in depths]
        self.spare = order

    def step(
        self,
        kernels: CpuKernels,
        parts: Sequence[Part],
        window: int | None = None,
        norms: HeadNorms | None = None,
        rope: int = 0,
    ) -> list[torch.Tensor]:
        """Attended values of the tokens of each part, computed in one step."""
        qkv = torch.cat([self.qkv[row][first:end] for row, first, end in parts])
        out = kernels.attention(qkv, LAYER, self._work(parts), norms, window, rope)
        return list(out.split([end - first for _, first, end in parts]))

    def _work(self, parts: Sequence[Part]) -> StepWork:
        size = self.shape.block_size
        tokens = [(row, p) for row, first, end in parts for p in range(first, end)]
        tables = [self.tables[row][: -(-end // size)] for row, _, end in parts]
        slots = [self.tables[row][p // size] * size + p % size for row, p in tokens]
        return StepWork(
            positions=torch.tensor([position for _, position in tokens]),
            slots=torch.tensor(slots),
            query_starts=_starts([end - first for _, first, end in parts]),
            seq_lens=_ints([end for _, _, end in parts]),
            block_starts=_starts([len(table) for table in tables]),
            blocks=_ints([block for table in tables for block in table]),
            kv=self.kv,
            adapters=AdapterRuns(torch.empty(0, 0), torch.empty(0, 2), (), ()),
        )


@dataclass(frozen=True)
class Formula:
    """The formula of attention, in any dtype."""

    shape: AttentionShape
    window: int | None = None
    norms: HeadNorms | None = None

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Attended values of a whole sequence, [T, heads * head_dim]."""
        shape, length = self.shape, len(qkv)
        heads = qkv.view(length, -1, shape.head_dim).transpose(0, 1)
        counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = heads.split(counts)
        if self.norms is not None:
            q = _norm(q, self.norms.q, self.norms.eps)
            k = _norm(k, self.norms.k, self.norms.eps)
        q, k = self._rotated(q), self._rotated(k)
        ratio = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(ratio, dim=0), v.repeat_interleave(ratio, dim=0)
        scores = q @ k.transpose(1, 2) * (shape.scale or shape.head_dim**-0.5)
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        position = torch.arange(length)
        behind = position[:, None] - position
        seen = (behind >= 0) & (behind < (self.window or length))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (t[0, : x.shape[1]].to(x.dtype) for t in (self.shape.cos, self.shape.sin))
        half = cos.shape[1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)


def runs_of(case: LoRACase) -> AdapterRuns:
    """Runs of a case: adjacent tokens of one slot are a run; tokens of slot -1 are in none."""
    bounds: list[list[int]] = []
    slots: list[int] = []
    before = -1
    for token, slot in enumerate(case.slots):
        if slot >= 0 and slot == before:
            bounds[-1][1] = token + 1
        elif slot >= 0:
            bounds.append([token, token + 1])
            slots.append(slot)
        before = slot
    return AdapterRuns(
        arena=case.work.arena,
        bounds=torch.tensor(bounds, dtype=torch.int32).view(-1, 2),
        tile_tables=tuple(case.tile_tables[slot] for slot in slots),
        scales=tuple(case.scales[slot] for slot in slots),
    )


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return _ints([sum(counts[:i]) for i in range(len(counts) + 1)])


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
