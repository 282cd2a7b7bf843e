"""The operations of a step on a CPU. The results of all implementations agree to rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.cpu.work import AdapterRuns, StepWork
from kernels.elementwise import Activation
from kernels.quantized import Weight
from kernels.work import HeadNorms, Site

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


class CpuKernels(Protocol):
    """One implementation of a step's operations.

    name: for the log.   rounds_rows_of: bits of the codes before whose products rows are rounded.
    """

    name: str
    rounds_rows_of: Sequence[int]

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Make a layer.   weight: [out, in], bias: [out]; the caller need not keep them."""
        ...

    def embedding(self, weight: torch.Tensor, tied_head: Linear | None) -> Embedding:
        """Make an embedding.   weight: [vocab, hidden]; the caller need not keep it.

        tied_head: the `linear` of the same weight, if that is also the model's head.
        """
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """weight * x / rms(x), computed in float32.   x: [T, hidden].   weight: [hidden].

        delta: is added to x first, in place.
        """
        ...

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
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See kernels.elementwise.gated.   gate_up: [T, 2 * intermediate], side by side."""
        ...

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, site: Site, runs: AdapterRuns) -> None:
        """y[t] += scale * B @ A @ x[t] for the site's projections and the tokens of each run.

        y: [T, sum of out], changed in place; other tokens' rows are not touched. It may be columns
        of a larger tensor.   x: [T, in].
        """
        ...
