"""Interface of a step's kernels: `kernels.gpu.ops`, or `kernels.reference` without a GPU."""

from typing import Protocol

import torch

from kernels.packed import PackedWeight
from kernels.routing import Routing
from kernels.stacked import ExpertStack
from kernels.work import (
    AttentionWork,
    Delta,
    HeadNorms,
    LoRAWork,
    PenaltyWork,
    SamplingWork,
    Site,
)


class Kernels(Protocol):
    """Kernels of a step; `kernels.reference` defines what each of them computes."""

    def embed(
        self,
        table: torch.Tensor,
        input_ids: torch.Tensor,
        sources: torch.Tensor,
        previous: torch.Tensor,
        /,
    ) -> torch.Tensor: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        finite: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor: ...

    def rope_store_kv(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        finite: torch.Tensor,
        norms: HeadNorms | None = None,
        delta: Delta | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        /,
    ) -> None: ...

    def decode_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        work: AttentionWork,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        /,
    ) -> None: ...

    def prefill_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        work: AttentionWork,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        /,
    ) -> None: ...

    def prefill_queries(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, /
    ) -> int: ...

    def silu_mul(self, gate_up: torch.Tensor, delta: Delta | None = None, /) -> torch.Tensor: ...

    def gelu_mul(self, gate_up: torch.Tensor, delta: Delta | None = None, /) -> torch.Tensor: ...

    def shrink(self, x: torch.Tensor, work: LoRAWork, site: Site, /) -> Delta: ...

    def expand(self, y: torch.Tensor, delta: Delta, /) -> None: ...

    def quantize_fp8(self, x: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...

    def multiply_quantized(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor: ...

    def route(
        self, x: torch.Tensor, router: torch.Tensor, per_token: int, norms_weights: bool, /
    ) -> Routing: ...

    def multiply_experts(
        self, x: torch.Tensor, weight: ExpertStack, routing: Routing, is_grouped: bool = False, /
    ) -> torch.Tensor: ...

    def sum_experts(self, outputs: torch.Tensor, routing: Routing, /) -> torch.Tensor: ...

    def copy_slabs(
        self,
        target: torch.Tensor,
        target_ids: torch.Tensor,
        source: torch.Tensor,
        source_ids: torch.Tensor,
        /,
    ) -> None: ...

    def adjust_logits(self, logits: torch.Tensor, work: PenaltyWork, /) -> None: ...

    def sample(self, logits: torch.Tensor, work: SamplingWork, /) -> torch.Tensor: ...
