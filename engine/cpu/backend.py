"""The CPU backend of an engine."""

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.cpu.choice import choose_kernels
from engine.cpu.decoder import Decoder, attention_shape
from engine.cpu.runner import ModelRunner
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.ranks import Ranks
from engine.models.rounding import WeightRounding
from engine.models.weights import ShardedWeights, give_back_memory, open_weights
from engine.steps.backend import Backend
from engine.steps.meter import TokenMeter
from engine.steps.segments import Tables
from kernels.cpu.errors import Unavailable
from lora.layout import Layout
from lora.packed import PackedForm


def cpu_backend(
    config: EngineConfig, model_config: DecoderConfig, form: PackedForm, ranks: Ranks | None = None
) -> Backend:
    """Make the CPU backend. ranks: see Decoder. Raises UnsupportedModel."""
    assert config.arena_bytes is not None, "not resolved yet"
    layout = form.layout
    model = open_decoder(config, model_config, layout.block_size, ranks, layout)
    give_back_memory()
    num_slabs = config.arena_bytes // layout.slab_bytes  # the same number on every rank
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8)

    def make_runner(tables: Tables, meter: TokenMeter, num_swap_slots: int) -> ModelRunner:
        return ModelRunner(model, slabs, form, tables, meter, num_swap_slots)

    return Backend(slabs, None, model.weight_bytes, make_runner, model.kernels.rounds_rows_of)


def open_decoder(
    config: EngineConfig,
    model_config: DecoderConfig,
    block_size: int,
    ranks: Ranks | None = None,
    layout: Layout | None = None,
) -> Decoder:
    """Open the model of config's folder.   block_size: tokens of a KV block.   ranks, layout: see
    Decoder.

    Raises UnsupportedModel.
    """
    assert config.max_model_len is not None, "not resolved yet"
    dtype: torch.dtype = getattr(torch, config.dtype)
    own = model_config.shard(ranks.shard.size if ranks else 1)
    shape = attention_shape(own, block_size, config.max_model_len, dtype)
    stored = open_weights(Path(config.model_dir), dtype)
    rounding = WeightRounding.of(config.quantization)
    kernels = choose_kernels(config, own, shape, rounding=stored.rounding or rounding.projections)
    weights = ShardedWeights(stored, ranks.shard) if ranks else stored
    try:
        return Decoder(model_config, weights, kernels, ranks, layout, rounding)
    except Unavailable as reason:  # for the head, whose shape the self-check does not have
        raise UnsupportedModel(str(reason)) from None
