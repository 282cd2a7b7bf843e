"""The operations in C, see `csrc`. A row's bits do not depend on the rest of the batch."""

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu.addresses import Struct, address_table
from kernels.cpu.bindings import load_library
from kernels.cpu.errors import Unavailable
from kernels.cpu.native_linear import NativeInt4Linear, NativeInt8Linear, NativeLinear
from kernels.cpu.plain import AttentionShape, CpuKernels, Embedding, Linear
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.elementwise import Activation
from kernels.quantized import QuantizedWeight, Weight, as_numbers
from kernels.work import HeadNorms, Site

_LANES = 16
"""Number that head_dim and block_size must be multiples of."""


class _Shape(Struct):
    """The struct `Shape` of attention.c."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("slab", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _LoRAWork(Struct):
    """The struct `Work` of lora.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "x", "arena", "bounds", "tables", "scales")),
        *((name, ctypes.c_void_p) for name in ("depths", "outs")),
        *((name, ctypes.c_int64) for name in ("in_features", "stride", "num_projections")),
        *((name, ctypes.c_int64) for name in ("num_runs", "place")),
    )


class NativeKernels(CpuKernels):
    """The operations in C, in float32. A row's bits depend on the row only.

    threads: how many every operation uses.   Raises Unavailable.
    """

    rounds_rows_of: Sequence[int] = (4, 8)

    def __init__(self, shape: AttentionShape, threads: int) -> None:
        if shape.cos.dtype != torch.float32:
            raise Unavailable("the C kernels compute in float32 only")
        if shape.head_dim % _LANES or shape.block_size % _LANES:
            raise Unavailable(f"head_dim and block_size must be multiples of {_LANES}")
        super().__init__(shape)
        self.threads = threads
        self._library = load_library()
        self.name = f"C, {self._library.path}"
        self._found: tuple[AdapterRuns, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None
        self._found = None
        self._cos, self._sin = shape.cos.contiguous(), shape.sin.contiguous()

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Make a layer. Raises Unavailable for a rounding that has no kernel here."""
        if not isinstance(weight, QuantizedWeight):
            return NativeLinear(self._library, as_numbers(weight), bias, self.threads)
        make = NativeInt8Linear if weight.rounding.bits == 8 else NativeInt4Linear
        return make(self._library, weight, bias, self.threads)

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        # Rows come from the tied head's panels, so that the weight is in memory only once.
        return tied_head.rows if isinstance(tied_head, NativeLinear) else weight.__getitem__

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = torch.empty_like(x)
        self._library.rms_norm(x, delta, weight, y, eps, *x.shape, self.threads)
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
        shape, num_tokens = self.shape, qkv.shape[0]
        layer_size = 2 * shape.num_kv_heads * shape.head_dim * shape.block_size
        kv = work.kv[:, layer * layer_size :]
        about = ctypes.byref(
            _Shape(
                shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
                self._cos[rope], self._sin[rope], self._cos.shape[2],
                work.kv.stride(0), shape.scale or 0.0, shape.softcap or 0.0,
            )
        )  # fmt: skip
        finite = torch.empty(num_tokens, dtype=torch.uint8)
        self._library.rope_store(
            about,
            qkv,
            norms.q if norms else None,
            norms.k if norms else None,
            norms.eps if norms else 0.0,
            work.positions,
            work.slots,
            kv,
            finite,
            num_tokens,
            self.threads,
        )
        out = torch.empty(num_tokens, shape.num_heads * shape.head_dim)
        self._library.attend(
            about,
            qkv,
            out,
            finite,
            kv,
            work.query_starts,
            work.seq_lens,
            work.block_starts,
            work.blocks,
            len(work.seq_lens),
            window or self._cos.shape[1],
            self.threads,
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2)
        is_gelu = activation == "gelu_tanh"
        self._library.gated(gate_up, y, rows, width // 2, is_gelu, self.threads)
        return y

    def _addresses(self, runs: AdapterRuns) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Addresses of the runs' tables and scales, and the tables' depths; found once per step."""
        if self._found is None or self._found[0] is not runs:
            tables = address_table(runs.tile_tables)
            scales = address_table(runs.scales)
            depths = torch.tensor([table.shape[2] for table in runs.tile_tables])
            self._found = runs, (tables, scales, depths)
        return self._found[1]

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        tables, scales, depths = self._addresses(runs)
        outs = (ctypes.c_int64 * len(site.out_features))(*site.out_features)
        work = _LoRAWork(
            y, x, runs.arena, runs.bounds, tables, scales, depths, ctypes.addressof(outs),
            site.in_features, y.stride(0), len(outs), len(depths),
            site.layer * site.num_projections + site.projections[0],
        )  # fmt: skip
        self._library.add_lora(ctypes.byref(work), self.threads)
