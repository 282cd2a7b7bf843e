"""The CUDA backend of an engine: the model in a device's memory, and an arena in the rest."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from engine.config import EngineConfig
from engine.drafts.speculation import MOST_DRAFTS
from engine.errors import UnsupportedModel
from engine.gpu.decoder import GpuDecoder
from engine.gpu.inputs import StepLimits
from engine.gpu.kernels import Kernels
from engine.gpu.linear import LEAST_FP8_CAPABILITY, Quantization
from engine.gpu.profile import fit_slabs, run_largest_steps
from engine.gpu.runner import GpuRunner
from engine.models.config import DecoderConfig
from engine.models.ranks import Ranks
from engine.models.rounding import WeightRounding
from engine.models.weights import ShardedWeights, open_weights
from engine.proofs.merged import scratch_bytes
from engine.steps.backend import Backend
from engine.steps.meter import TokenMeter
from engine.steps.segments import Tables
from kernels import reference
from kernels.quantized import Weight
from kernels.reference import FP8
from lora.device import CudaDevice, Device
from lora.packed import PackedForm
from lora.shard import WHOLE, Shard
from registry.extras import ExtraMissing

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = 80
_DRAFTING_TOKENS = 256
"""Tokens of a step up to which drafts may pay. A bf16 weight takes two operations a token and two
bytes, and an A100 has arithmetic for 153 operations while it reads a byte, an H100 for 295.
"""
_DRAFT_LOGITS_BYTES = 64 << 20
"""Memory for logits of drafts beside those of rows: 128 drafts at a vocabulary of 128k."""


def gpu_backend(
    config: EngineConfig, model_config: DecoderConfig, form: PackedForm, ranks: Ranks | None = None
) -> Backend:
    """Make the backend on the rank's own CUDA device, or the first. Raises UnsupportedModel."""
    if not torch.cuda.is_available():
        raise UnsupportedModel("device cuda: torch finds no CUDA device here; take device cpu")
    try:
        from kernels.gpu import ops
        from kernels.gpu.launch import capability
        from kernels.gpu.rows import MAX_COLUMNS
    except ModuleNotFoundError:
        raise UnsupportedModel(str(ExtraMissing("device cuda", "triton"))) from None
    check_width(model_config, MAX_COLUMNS)
    shard = ranks.shard if ranks else WHOLE
    check_count(torch.cuda.device_count(), shard)
    there = torch.device("cuda", shard.index)
    torch.cuda.set_device(there)
    device = CudaDevice(there)
    # Weights and arena are filled on the stream that uses them.
    torch.cuda.set_stream(device.compute)
    torch.set_float32_matmul_precision("highest")  # a proof's reference is no TF32
    check_capability(capability(there), config)
    dtype: torch.dtype = getattr(torch, config.dtype)
    stored = open_weights(Path(config.model_dir), dtype)
    weights = ShardedWeights(stored, shard) if ranks else stored
    drafts = most_drafts(config, model_config.vocab_size)
    return assemble(config, model_config, form, weights, device, ops, ranks, drafts)


def most_drafts(config: EngineConfig, vocab_size: int) -> int:
    """The `max_num_drafts` of StepLimits that a step keeps memory for, the same on all ranks: as
    many as may pay beside the most rows.
    """
    if config.speculation == "off":
        return 0
    assert config.max_num_seqs is not None, "not resolved yet"
    most_choices = min(_DRAFTING_TOKENS, (1 + MOST_DRAFTS) * config.max_num_seqs)
    affordable = _DRAFT_LOGITS_BYTES // (4 * vocab_size)
    return max(0, min(most_choices - config.max_num_seqs, affordable))


def check_width(model_config: DecoderConfig, most: int) -> None:
    """Check the hidden size. most: features of a token that a kernel can hold.

    Raises UnsupportedModel.
    """
    hidden_size = model_config.shape.hidden_size
    if hidden_size > most:
        raise UnsupportedModel(
            f"hidden_size {hidden_size}: a GPU serves {most} at most; take device cpu"
        )


def check_count(num_devices: int, shard: Shard) -> None:
    """Check that there is a CUDA device for every rank. Raises UnsupportedModel."""
    if num_devices < shard.size:
        raise UnsupportedModel(
            f"tensor_parallel_size {shard.size} wants as many CUDA devices, here are {num_devices}"
        )


def check_capability(capability: int, config: EngineConfig) -> None:
    """Check a GPU's compute capability, given as 90 for 9.0. Raises UnsupportedModel."""
    if capability < _LEAST_CAPABILITY:
        raise UnsupportedModel(
            f"this GPU has compute capability {capability / 10}; {_LEAST_CAPABILITY / 10} is the "
            "least that is served: take device cpu"
        )
    if "fp8" in (config.quantization, config.kv_cache_dtype) and capability < LEAST_FP8_CAPABILITY:
        raise UnsupportedModel(
            f"FP8 wants compute capability {LEAST_FP8_CAPABILITY / 10}, this GPU has "
            f"{capability / 10}: leave out quantization and kv_cache_dtype"
        )


def assemble(
    config: EngineConfig,
    model_config: DecoderConfig,
    form: PackedForm,
    weights: Mapping[str, Weight],
    device: Device,
    kernels: Kernels,
    ranks: Ranks | None = None,
    max_num_drafts: int = 0,
) -> Backend:
    """Make a backend of its parts. weights, ranks: see GpuDecoder. Raises UnsupportedModel.

    max_num_drafts: see StepLimits; memory is kept for so many.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    is_eager = config.enforce_eager or bool(config.reference_kernels)
    if config.reference_kernels:
        kernels = cast(Kernels, SomeReferences(kernels, config.reference_kernels))
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype
    limits = step_limits(config, model_config, kernels, dtype, device.torch_device, max_num_drafts)
    quantization: Quantization | None = "fp8" if config.quantization == "fp8" else None
    model = GpuDecoder(
        model_config, weights, limits.max_model_len, device, kernels, quantization, ranks,
        config.lora_overlap, WeightRounding.of(config.quantization),
    )  # fmt: skip
    if ranks is not None:
        ranks.least(0)  # a barrier: reading weights may take longer than a step's sums wait
    slab_bytes = form.layout.slab_bytes
    memory = run_largest_steps(model, form, kv_dtype, limits, is_eager)
    if model.is_first:  # a proof's merged weights run there
        memory = replace(memory, free_bytes=memory.free_bytes - scratch_bytes(model_config))
    num_slabs = fit_slabs(memory, config, slab_bytes)
    if ranks is not None:
        num_slabs = ranks.least(num_slabs)  # so that a slab's number means the same on all
    slabs = torch.zeros(num_slabs, slab_bytes, dtype=torch.uint8, device=device.torch_device)

    def make_runner(tables: Tables, meter: TokenMeter, num_swap_slots: int) -> GpuRunner:
        runner = GpuRunner(model, slabs, form, kv_dtype, tables, meter, limits, num_swap_slots)
        if not is_eager:
            start = time.monotonic()
            runner.capture_graphs()
            logger.info("graphs captured in %.1f s", time.monotonic() - start)
        return runner

    most_choices = limits.most_choices
    return Backend(slabs, device, model.weight_bytes, make_runner, most_choices=most_choices)


class SomeReferences:
    """Kernels of which the named ones are plain torch. Raises UnsupportedModel for other names."""

    def __init__(self, kernels: Kernels, names: Sequence[str]) -> None:
        for name in names:
            if not (hasattr(kernels, name) and hasattr(reference, name)):
                raise UnsupportedModel(
                    f"reference_kernels: {name} is no kernel; kernels/reference.py has their names"
                )
        self._kernels, self._names = kernels, frozenset(names)

    def __getattr__(self, name: str) -> object:
        return getattr(reference if name in self._names else self._kernels, name)


def step_limits(
    config: EngineConfig,
    model_config: DecoderConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    there: torch.device,
    max_num_drafts: int = 0,
) -> StepLimits:
    """Largest sizes of a step, and the size of tiles in which the prefill attention takes it."""
    assert config.max_model_len is not None, "not resolved yet"
    assert config.max_num_seqs is not None, "not resolved yet"
    assert config.max_num_batched_tokens is not None, "not resolved yet"
    shape = model_config.shape
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        prefill_queries=kernels.prefill_queries(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, there
        ),
        sliding_window=config.sliding_window,
        max_num_drafts=max_num_drafts,
    )
