"""A chain of layers without attention, to measure the time that adapters add: torch computes the
products, our kernels rotary embedding and activation, the system under test adds the adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.machine import Machine, Work
from engine.gpu.inputs import StepInputs
from kernels.work import Delta, Site
from lora.sites import site_of

QKV, OUT, GATE_UP, DOWN = (0, 1, 2), (3,), (4, 5), (6,)
SITES = (QKV, OUT, GATE_UP, DOWN)
FUSED = (QKV, GATE_UP)
"""Sites whose next kernel can do the expand, too."""

_MAX_POSITIONS = 4096

Project = Callable[[torch.Tensor, torch.Tensor, Site], tuple[torch.Tensor, Delta | None]]
"""(x, weight, site) -> x @ weight.T with the adapters added, or with their delta, which is left
for the next kernel to add.
"""


@dataclass(frozen=True)
class LayerOutputs:
    """Results of one layer of the chain, for the check.

    q: rotated queries, part of a tensor whose k and v are undefined.   down: the result.
    """

    q: torch.Tensor
    down: torch.Tensor


def by_torch(x: torch.Tensor, weight: torch.Tensor, site: Site) -> tuple[torch.Tensor, None]:
    """Project by the base model alone."""
    return x @ weight.T, None


class Chain:
    """A chain of layers. Each has weights of its own and starts from the same input, so that values
    do not grow.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.shape = machine, machine.shape
        self._weights = [
            {projections: self._weight(projections) for projections in SITES}
            for _ in range(self.shape.num_layers)
        ]
        half = torch.rand(_MAX_POSITIONS, self.shape.head_dim // 2, device=machine.there)
        self._turn = half.cos(), half.sin()

    def _weight(self, projections: tuple[int, ...]) -> torch.Tensor:
        site = site_of(self.shape, 0, projections)
        out_features = sum(site.out_features)
        return self.machine.randn(out_features, site.in_features, std=site.in_features**-0.5)

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs of a layer, and random outputs of its attention."""
        q_width = self.shape.num_heads * self.shape.head_dim
        randn = self.machine.randn
        return randn(num_tokens, self.shape.hidden_size), randn(num_tokens, q_width)

    def layer(
        self,
        index: int,
        x: torch.Tensor,
        attended: torch.Tensor,
        step: StepInputs,
        kv: torch.Tensor,
        project: Project,
        kernels: Any,
    ) -> LayerOutputs:
        """Run one layer, in x's dtype.   kv: [slabs, layers, 2, kv heads, block_size, head_dim]."""
        weights = {key: weight.to(x.dtype) for key, weight in self._weights[index].items()}
        finite = torch.empty_like(step.positions)

        def at(projections: tuple[int, ...], y: torch.Tensor) -> tuple[torch.Tensor, Delta | None]:
            return project(y, weights[projections], site_of(self.shape, index, projections))

        qkv, delta = at(QKV, x)
        turn = *self._turn, step.positions
        kernels.rope_store_kv(qkv, kv[:, index], *turn, step.slots, finite, None, delta)
        o, _ = at(OUT, attended)
        gate_up, delta = at(GATE_UP, o)
        down, _ = at(DOWN, kernels.silu_mul(gate_up, delta))
        return LayerOutputs(qkv[:, : attended.shape[1]], down)

    def work(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs,
        kv: torch.Tensor,
        project: Project,
        kernels: Any,
    ) -> Work:
        """Return work that runs all layers, one after the other."""

        def run() -> None:
            for index in range(self.num_layers):
                self.layer(index, *inputs, step, kv, project, kernels)

        return run


def systems(machine: Machine, step: StepInputs, kernels: Any) -> Mapping[str, Project]:
    """Three ways to use the same kernels, ours or those of torch.

    plain: one after the other.   beside: the shrink runs beside the product.   model: besides, the
    next kernel does the expand, as in the engine's model.
    """
    work = step.lora
    assert work is not None

    def plain(x: torch.Tensor, weight: torch.Tensor, site: Site) -> tuple[torch.Tensor, None]:
        delta = kernels.shrink(x, work, site)
        y = x @ weight.T
        kernels.expand(y, delta)
        return y, None

    def shrunk_beside(
        x: torch.Tensor, weight: torch.Tensor, site: Site
    ) -> tuple[torch.Tensor, Delta]:
        done: list[Delta] = []
        join = machine.device.beside(lambda: done.append(kernels.shrink(x, work, site)))
        y = x @ weight.T
        join()
        return y, done.pop()

    def beside(x: torch.Tensor, weight: torch.Tensor, site: Site) -> tuple[torch.Tensor, None]:
        y, delta = shrunk_beside(x, weight, site)
        kernels.expand(y, delta)
        return y, None

    def model(
        x: torch.Tensor, weight: torch.Tensor, site: Site
    ) -> tuple[torch.Tensor, Delta | None]:
        y, delta = shrunk_beside(x, weight, site)
        if site.projections in FUSED:
            return y, delta
        kernels.expand(y, delta)
        return y, None

    return {"plain": plain, "beside": beside, "model": model}
