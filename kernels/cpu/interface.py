"""The operations of a step on a CPU. Whoever computes them, results agree to rounding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.cpu.work import AdapterRuns, StepWork
from kernels.work import HeadNorms, Site

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x: [T, in] -> x @ weight.T + bias, [T, out], newly allocated."""


Embedding = Callable[[torch.Tensor], torch.Tensor]
"""ids: [T] int64 -> their rows of the weight, [T, hidden], newly allocated."""


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """What a model's attention is like in all layers.

    cos, sin: [positions, head_dim / 2], in the dtype of the hidden states.
    block_size: tokens of a KV block.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cos: torch.Tensor
    sin: torch.Tensor


class CpuKernels(Protocol):
    """name: for the log."""

    name: str

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """weight: [out, in], bias: [out]; not needed any more, once this returns."""
        ...

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        """weight: [vocab, hidden]; not needed any more, once this returns.

        tied_head: the same weight as a `linear`, where it is the model's head, too.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """weight * x / rms(x), computed in float32.   x: [T, hidden].   weight: [hidden]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x += delta, in place; then the norm of x."""
        ...

    def attention(
        self,
        qkv: torch.Tensor,
        layer: int,
        work: StepWork,
        norms: HeadNorms | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """From projections to attended values: head norms, rotary embedding, KV written, attention.

        qkv: [T, (heads + 2 * kv heads) * head_dim], which may be overwritten.   window: positions
        that a token sees, its own with them; None for all.   Result: [T, heads * head_dim].
        Of a token whose keys or values are not finite, zeros go to the cache and its result is NaN:
        under a mask 0 * NaN is NaN, for every later owner of the block.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up.   gate_up: [T, 2 * intermediate], side by side."""
        ...

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        """y[t] += scale * B @ A @ x[t] of the site's projections, for the tokens of each run.

        y: [T, sum of out], changed in place; other tokens' rows are not touched.   x: [T, in].
        """
        ...
