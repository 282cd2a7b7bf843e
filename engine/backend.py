"""What an engine computes on: the arena's memory, and a runner for it. Here the CPU's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.core import Runner
from engine.meter import TokenMeter
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.runner import ModelRunner
from engine.segments import Tables
from engine.weights import load_weights
from lora.device import Device
from lora.packed import PackedForm


class MeasuredRunner(Runner, Protocol):
    """copy_bytes_per_s: between arena and swap space; 0 where there is none."""

    copy_bytes_per_s: float


@dataclass(frozen=True)
class Backend:
    """slabs: the arena, [slabs, slab_bytes] uint8.   device: None where they are host memory.

    make_runner: from the adapters' tables, a meter and the number of swap slots.
    """

    slabs: torch.Tensor
    device: Device | None
    weight_bytes: int
    make_runner: Callable[[Tables, TokenMeter, int], MeasuredRunner]


def cpu_backend(config: EngineConfig, model_config: DecoderConfig, form: PackedForm) -> Backend:
    """Raises UnsupportedModel."""
    assert config.arena_bytes is not None, "not resolved yet"
    assert config.max_model_len is not None, "not resolved yet"
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights = load_weights(Path(config.model_dir), torch.device("cpu"), dtype)
    model = Decoder(model_config, weights, config.max_model_len)
    layout = form.layout
    num_slabs = config.arena_bytes // layout.slab_bytes
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8)

    def make_runner(tables: Tables, meter: TokenMeter, num_swap_slots: int) -> ModelRunner:
        return ModelRunner(model, slabs, form, tables, meter, num_swap_slots)

    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    return Backend(slabs, None, weight_bytes, make_runner)
