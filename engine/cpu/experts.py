"""The MLP of a layer that consists of experts, on a CPU."""

from dataclasses import dataclass

import torch

from engine.cpu.products import fused
from engine.models.checkpoint import ExpertWeights
from engine.models.experts import Experts
from kernels.cpu.plain import CpuKernels, Linear
from kernels.elementwise import Activation
from kernels.routing import choose_experts, weighted_sum


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert: an MLP of its own."""

    gate_up: Linear
    down: Linear


class ExpertMlp:
    """Experts and their router. Experts that no token of a step chooses are not computed.

    weights: each expert's are read as it is made, so that only one is in memory twice.
    """

    def __init__(
        self, experts: Experts, weights: ExpertWeights, kernels: CpuKernels, activation: Activation
    ) -> None:
        self._about, self._kernels, self._activation = experts, kernels, activation
        self._router = kernels.linear(weights.router, None)
        self._experts = [
            _Expert(fused(kernels, (gate, up), (None, None)), kernels.linear(down, None))
            for gate, up, down in weights.experts
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of the outputs of each row's experts by their weights.   x: [T, hidden].

        A row's bits depend on the row only, if those of the kernels do.
        """
        per_token = self._about.per_token
        chosen, weights = choose_experts(
            self._router(x), per_token, norms_weights=self._about.norms_weights
        )
        outputs = x.new_empty(*chosen.shape, x.shape[1])
        # Pairs of a row and one of its experts, as indices into `chosen`, in the experts' order.
        pairs = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        for expert, own in zip(self._experts, pairs.split(counts), strict=True):
            if len(own):
                gate_up = expert.gate_up(x[own // per_token])
                activated = self._kernels.gated(gate_up, self._activation)
                outputs.flatten(0, 1)[own] = expert.down(activated)
        return weighted_sum(outputs, weights)
