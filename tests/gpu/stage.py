"""A random model on a device with an arena, adapters that come and go, and rows for its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.gpu.backend import step_limits
from engine.gpu.decoder import GpuDecoder
from engine.gpu.runner import GpuRunner
from engine.models.config import DecoderConfig
from engine.models.ranks import Ranks
from engine.steps.batch import Batch, ScheduledRow, StepTokens
from engine.steps.meter import TokenMeter
from engine.steps.segments import Tables
from engine.wire.messages import SamplingParams
from lora.batch import DeviceTables
from lora.device import Device
from lora.host import PackedAdapter
from lora.packed import PackedForm
from tests.gpu.models import place

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Stage:
    """A model's runner with its arena and adapters.

    arena: [slabs, slab_bytes] uint8 on the device.   adapters: (generation, tables) by key.
    """

    form: PackedForm
    arena: torch.Tensor
    make_runner: Callable[[Tables], GpuRunner]
    adapters: dict[str, tuple[int, DeviceTables]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = self.make_runner(self.adapters.__getitem__)

    def place(self, key: str, packed: PackedAdapter, slabs: list[int]) -> None:
        """Place an adapter in these slabs under this key, which another one may have had before."""
        generation, _ = self.adapters.get(key, (0, None))
        self.adapters[key] = generation + 1, place(packed, self.form, slabs, self.arena)

    def row(
        self,
        name: str,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        key: str | None,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> ScheduledRow:
        """Make a row with the adapter that is under `key` now, or on the base model."""
        generation, tables = self.adapters[key] if key else (0, None)
        adapter = key, tables and tables.digest, generation
        return make_row(name, tokens, start, blocks, adapter, sampling)._replace(**fields)

    def run(self, batch: Batch) -> tuple[StepTokens, torch.Tensor]:
        """Tokens of a step, and its logits after penalties, [rows and drafts, vocab], in host
        memory.
        """
        self.runner.launch(batch)
        tokens = self.runner.collect()
        count = len(batch.rows) + sum(row.num_drafts for row in batch.rows)
        return tokens, self.runner.out.logits[:count].to("cpu", copy=True)


def make_row(
    name: str,
    tokens: Sequence[int],
    start: int,
    blocks: Sequence[int],
    adapter: tuple[str | None, str | None, int],
    sampling: SamplingParams = GREEDY,
) -> ScheduledRow:
    """Make a row.   adapter: key, digest and generation."""
    return ScheduledRow(name, tuple(tokens), start, tuple(blocks), *adapter, sampling, start, start)


def eager_stage(
    folder: Path,
    config: DecoderConfig,
    form: PackedForm,
    weights: Mapping[str, torch.Tensor],
    device: Device,
    kernels: Any,
    num_slabs: int,
    ranks: Ranks | None = None,
    max_num_drafts: int = 0,
    kv_dtype: torch.dtype | None = None,
    **limits: int,
) -> Stage:
    """Make a stage whose graphs are not captured yet.

    weights, ranks: see GpuDecoder.   max_num_drafts: see StepLimits.   kv_dtype: None for that of
    the weights.   limits: see make_engine_config.
    """
    dtype: torch.dtype = getattr(torch, form.dtype)
    there = device.torch_device
    engine_config = make_engine_config(folder, config, form, **limits)
    of_steps = step_limits(engine_config, config, kernels, dtype, there, max_num_drafts)
    model = GpuDecoder(config, weights, of_steps.max_model_len, device, kernels, ranks=ranks)
    arena = torch.zeros(num_slabs, form.layout.slab_bytes, dtype=torch.uint8, device=there)
    meter = TokenMeter(folder / "meter")
    kv_dtype = kv_dtype or dtype
    return Stage(
        form, arena, lambda tables: GpuRunner(model, arena, form, kv_dtype, tables, meter, of_steps)
    )


def make_engine_config(
    folder: Path, config: DecoderConfig, form: PackedForm, **limits: int | None
) -> EngineConfig:
    """Make the configuration of an engine whose model has no files.

    limits: max_model_len, max_num_seqs, max_num_batched_tokens, arena_bytes.
    """
    return EngineConfig(
        data_dir=str(folder), model_dir="", base_revision=form.base_revision, vocabulary_path="",
        eos_token_ids=(), adapter_cache_dir="", fetcher_socket="", device="cuda", dtype=form.dtype,
        threads=1, sliding_window=config.sliding_window, **{"arena_bytes": None, **limits},
    )  # fmt: skip
