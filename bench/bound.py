"""Lower bound on the time of a burst on a CPU: the model's matrix products on the same machine.

Every token needs them, whichever system serves it; attention, adapters, sampling, HTTP come on top.
They are measured with the fastest library that we use, at the row counts of a run's own steps.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.plain import AttentionShape, CpuKernels, Linear

_REPEATS = 3

MakeLinear = Callable[[torch.Tensor, None], Linear]


class Products:
    """All linear layers of a model, each with random weights of its own, in every library that runs
    here; the fastest library counts, at each number of rows.

    model_dir: folder with the model's config.json.
    """

    def __init__(self, model_dir: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        config = json.loads((model_dir / "config.json").read_text())
        self._models = [_Model(config, make) for make in _libraries(threads)]

    def seconds(self, steps: Iterable[tuple[int, int]]) -> float:
        """Return the processor seconds of `steps`, each (tokens, rows that choose a token)."""
        counts = list(steps)
        layers = self._fastest([tokens for tokens, _ in counts], lambda model: model.layers)
        heads = self._fastest([rows for _, rows in counts if rows], lambda model: [model.head])
        return layers + heads

    def _fastest(
        self, rows: Sequence[int], of: Callable[["_Model"], Sequence[tuple[Linear, int]]]
    ) -> float:
        return sum(
            times * min(_seconds(of(model), count) for model in self._models)
            for count, times in Counter(rows).items()
        )


def _libraries(threads: int) -> list[MakeLinear]:
    no_positions = torch.zeros(1, 1, 16)
    shape = AttentionShape(1, 1, 32, 16, no_positions, no_positions)
    makers: list[MakeLinear] = [CpuKernels(shape).linear]
    with contextlib.suppress(Unavailable):
        makers.append(NativeKernels(shape, threads).linear)
    return makers


class _Model:
    """A model's linear layers in one library. layers, head: each with its number of inputs."""

    def __init__(self, config: dict[str, int], make: MakeLinear) -> None:
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        q = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        features = [(hidden, q + 2 * kv), (q, hidden)]
        features += [(hidden, 2 * intermediate), (intermediate, hidden)]
        self.layers = [
            (make(torch.randn(width_out, width_in), None), width_in)
            for _ in range(config["num_hidden_layers"])
            for width_in, width_out in features
        ]
        self.head = (make(torch.randn(config["vocab_size"], hidden), None), hidden)


@torch.inference_mode()
def _seconds(linears: Sequence[tuple[Linear, int]], num_rows: int) -> float:
    """Return the processor seconds of a pass over all layers, the fastest of a few."""
    inputs = {width: torch.randn(num_rows, width) for _, width in linears}
    seconds = []
    for _ in range(_REPEATS):
        start = time.process_time()
        for linear, width in linears:
            linear(inputs[width])
        seconds.append(time.process_time() - start)
    return min(seconds)
