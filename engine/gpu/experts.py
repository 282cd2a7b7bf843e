"""The MLP of a layer that consists of experts, on a device."""

import torch

from engine.errors import UnsupportedModel
from engine.gpu.kernels import Kernels
from engine.gpu.linear import Linears
from engine.models.checkpoint import ExpertWeights
from engine.models.experts import Experts
from kernels.elementwise import Activation
from kernels.quantized import form_of
from kernels.stacked import ExpertStack


class ExpertMlp:
    """Experts and their router. A step's tokens are ordered by experts on the device, and one
    product serves all experts, whatever the tokens choose: the host knows nothing of it.

    weights: each expert's are read when the one before has its place, and are not kept.
    Raises UnsupportedModel if the experts' weights differ in form.
    """

    def __init__(
        self, experts: Experts, weights: ExpertWeights, linears: Linears, activation: Activation
    ) -> None:
        self._about, self._activation = experts, activation
        self._kernels: Kernels = linears.kernels
        self._router = weights.router.to(linears.device)
        self._gate_up, self._down = _stacks(experts.count, weights, linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of the outputs of each row's experts by their weights.   x: [T, hidden].

        The router and the sum give a row the same bits whoever is beside it. The products do so
        among steps with tiles of the same number of rows (see `kernels.gpu.experts`).
        """
        kernels, about = self._kernels, self._about
        routing = kernels.route(x, self._router, about.per_token, about.norms_weights)
        gate_up = kernels.multiply_experts(x, self._gate_up, routing)
        activated = kernels.gated(gate_up, self._activation)
        outputs = kernels.multiply_experts(activated, self._down, routing, True)
        return kernels.sum_experts(outputs, routing)


def _stacks(count: int, weights: ExpertWeights, linears: Linears) -> list[ExpertStack]:
    """The experts' weights on the device: gate and up side by side, and down."""
    stacks: list[ExpertStack] = []
    for expert, (gate, up, down) in enumerate(weights.experts):
        if form_of(gate) != form_of(up):
            raise _differ(expert)
        placed = [linears.place((gate, up)), linears.place((down,))]
        stacks = stacks or [ExpertStack.empty(weight, count) for weight in placed]
        for stack, weight in zip(stacks, placed, strict=True):
            if not stack.is_like(weight):
                raise _differ(expert)
            stack.put(expert, weight)
    return stacks


def _differ(expert: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights of expert {expert} of a layer are not quantised like others of the layer: "
        "a GPU takes experts of one form; take device cpu"
    )
