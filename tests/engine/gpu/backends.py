"""A GPU's backend on a fake device, for engines in tests."""

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.gpu.backend import assemble
from engine.models.config import DecoderConfig
from engine.steps.backend import Backend
from lora.packed import PackedForm
from tests.engine.gpu.fake_device import FakeDevice
from tests.engine.gpu.recording import RecordingKernels


def make_config(folder: Path = Path("."), **values: object) -> EngineConfig:
    defaults = {
        "data_dir": str(folder),
        "model_dir": str(folder),
        "base_revision": "base-1",
        "vocabulary_path": "",
        "eos_token_ids": (),
        "adapter_cache_dir": "",
        "fetcher_socket": "",
        "device": "cuda",
        "dtype": "float32",
        "arena_bytes": None,
        "threads": 1,
        "max_model_len": 256,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 16,
    }
    return EngineConfig(**{**defaults, **values})  # type: ignore[arg-type]


def fake_backend(
    model_config: DecoderConfig,
    form: PackedForm,
    weights: dict[str, torch.Tensor],
    device: FakeDevice | None = None,
    max_num_drafts: int = 0,
    **values: object,
) -> Backend:
    """A GPU's backend on `device`. max_num_drafts: see StepLimits. values: fields of the engine's
    config.
    """
    config = make_config(dtype=form.dtype, sliding_window=model_config.sliding_window, **values)
    device = device or FakeDevice()
    backend = assemble(
        config, model_config, form, weights, device, RecordingKernels(device),
        max_num_drafts=max_num_drafts,
    )  # fmt: skip
    device.arena = backend.slabs
    return backend
