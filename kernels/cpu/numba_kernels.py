"""The operations compiled by numba, for machines without a C compiler: see `jit`."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kernels.cpu.addresses import addresses
from kernels.cpu.errors import Unavailable
from kernels.cpu.interface import AttentionShape, Embedding, Linear
from kernels.cpu.jit.attention import attend, scratch_size
from kernels.cpu.jit.blocks import Heads
from kernels.cpu.jit.rope import rope_store
from kernels.cpu.jit.rows import add_lora, gated_product, rms_norm
from kernels.cpu.jit.vector import LANES
from kernels.cpu.linear import MakeLinear
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.work import HeadNorms, Site

_TILE_ROWS = 48
"""Query rows of a kv head that share one pass over the keys."""

_RUN_TOKENS = 64
"""Tokens of an adapter that one thread takes at a time."""

# How many parts of an operation justify waking a thread, which takes 30 us.
_ROWS, _ITEMS = 64, 8


class NumbaKernels:
    """`CpuKernels` compiled by numba, in float32. A row's bits depend on the row only.

    linear: makes the linear layers.   threads: how many every other operation uses.
    Raises Unavailable.
    """

    name = "numba"
    rounds_rows_of: Sequence[int] = (8,)

    def __init__(self, shape: AttentionShape, linear: MakeLinear, threads: int) -> None:
        if shape.cos.dtype != torch.float32:
            raise Unavailable("numba's kernels compute in float32 only")
        if shape.head_dim % LANES or shape.block_size % LANES:
            raise Unavailable(f"head_dim and block_size must be multiples of {LANES}")
        self.shape = shape
        self.linear = linear
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1))
        self._cos, self._sin = shape.cos.contiguous(), shape.sin.contiguous()
        self._tile_tokens = max(1, _TILE_ROWS // (shape.num_heads // shape.num_kv_heads))
        size = scratch_size(self._tile_tokens, self._heads(0))
        self._scratch = torch.empty(threads, size)
        self._tiles: tuple[StepWork, torch.Tensor] | None = None
        self._runs: tuple[AdapterRuns, torch.Tensor] | None = None

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        return weight.__getitem__

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, 0, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(x, delta, weight, eps)

    def _norm(self, x: torch.Tensor, delta: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        self._share(_ROWS, rms_norm, len(x), x, delta, weight, y, eps, x.shape[1])
        return y

    def attention(
        self,
        qkv: torch.Tensor,
        layer: int,
        work: StepWork,
        norms: HeadNorms | None = None,
        window: int | None = None,
        rope: int = 0,
    ) -> torch.Tensor:
        shape, heads = self.shape, self._heads(work.kv.stride(0))
        layer_size = 2 * shape.num_kv_heads * shape.head_dim * shape.block_size
        kv = work.kv[:, layer * layer_size :]
        finite = torch.empty(len(qkv), dtype=torch.int32)
        q_norm, k_norm = (norms.q, norms.k) if norms else (0, 0)
        self._share(
            _ROWS, rope_store, len(qkv),
            heads, qkv, q_norm, k_norm,
            self._cos[rope], self._sin[rope], self._cos.shape[2],
            work.positions, work.slots, kv,
            finite, norms.eps if norms else 0.0, shape.scale or shape.head_dim**-0.5,
        )  # fmt: skip
        out = torch.empty(len(qkv), shape.num_heads * shape.head_dim)
        tiles = self._tiles_of(work)
        self._share(
            _ITEMS, attend, len(tiles),
            heads, tiles, work.blocks, qkv, out,
            finite, kv, window or self._cos.shape[1],
            self._scratch, self._scratch.shape[1], shape.softcap or 0.0,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(gate_up, is_gelu=0)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate(gate_up, is_gelu=1)

    def _gate(self, gate_up: torch.Tensor, is_gelu: int) -> torch.Tensor:
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2)
        self._share(_ROWS, gated_product, rows, gate_up, y, width // 2, is_gelu)
        return y

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        items, num_projections = self._items_of(runs), len(site.projections)
        self._share(
            _ITEMS, add_lora, len(items) * num_projections,
            items, x, site.in_features, y, y.stride(0),
            (*site.out_features, 0, 0)[:3], num_projections,
            site.layer * site.num_projections + site.projections[0], runs.arena,
        )  # fmt: skip

    def _share(self, grain: int, kernel: Any, count: int, *arguments: Any) -> None:
        """Run `count` parts of a kernel on this thread and others.

        grain: how many parts justify waking one more thread.   arguments: numbers and tensors.
        """
        threads = min(self.threads, 1 + count // grain)
        plain = addresses(arguments)
        others = [
            self._pool.submit(kernel, thread, threads, count, *plain)
            for thread in range(1, threads)
        ]
        kernel(0, threads, count, *plain)
        for other in others:
            other.result()

    def _heads(self, slab: int) -> Heads:
        shape = self.shape
        return Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, slab)

    def _tiles_of(self, work: StepWork) -> torch.Tensor:
        """The items of `attend`, which all layers of a step share."""
        if self._tiles is None or self._tiles[0] is not work:
            starts, ends = work.query_starts[:-1].tolist(), work.query_starts[1:].tolist()
            lens, blocks = work.seq_lens.tolist(), work.block_starts[:-1].tolist()
            items = [
                (head, first, min(first + self._tile_tokens, end), length - end + first, block)
                for start, end, length, block in zip(starts, ends, lens, blocks, strict=True)
                for first in range(start, end, self._tile_tokens)
                for head in range(self.shape.num_kv_heads)
            ]
            self._tiles = (work, torch.tensor(items, dtype=torch.int64))
        return self._tiles[1]

    def _items_of(self, runs: AdapterRuns) -> torch.Tensor:
        """The items of `add_lora`, which all sites of a step share."""
        if self._runs is None or self._runs[0] is not runs:
            tables, scales = addresses(runs.tile_tables), addresses(runs.scales)
            depths = [table.shape[2] for table in runs.tile_tables]
            items = [
                (at, min(at + _RUN_TOKENS, end), *adapter)
                for (first, end), *adapter in zip(
                    runs.bounds.tolist(), tables, scales, depths, strict=True
                )
                for at in range(first, end, _RUN_TOKENS)
            ]
            self._runs = (runs, torch.tensor(items, dtype=torch.int64))
        return self._runs[1]
