"""An engine on the device without a fetcher: packed adapters lie in a folder, or nowhere."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.gpu.backend import assemble
from engine.journal.journal import Journal
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.models.config import DecoderConfig
from engine.proofs.proof import Reference
from engine.scheduling.scheduler import Scheduler
from engine.steps.meter import TokenMeter
from kernels.gpu import ops
from lora.arena import Arena
from lora.device import Device
from lora.disk_cache import packed_path
from lora.errors import Failure
from lora.loader import ThreadLoader
from lora.loads import Fetched
from lora.manager import AdapterManager
from lora.packed import PackedForm, slabs_bytes
from lora.packing import pack
from lora.residency import ResidencyConfig
from registry.ref import AdapterRef
from tests.gpu.stage import make_engine_config


class PackedStore:
    """A store that packs the adapters put into it, in a folder like the fetcher's cache."""

    def __init__(self, root: Path, form: PackedForm) -> None:
        self.root, self.form = root, form
        root.mkdir()

    def put(self, key: str, path: Path) -> None:
        (target := self._path(key)).touch()
        pack(path, key.rpartition("/")[2], self.form, lambda _: target)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return packed_path(self.root, key.rpartition("/")[2], self.form.form_id)


class DiskLoader(ThreadLoader):
    """A loader without a fetcher: an adapter is on disk, or missing."""

    def fetch(self, ref: AdapterRef) -> None:
        path = packed_path(self.cache_dir, ref.digest, self.form.form_id)
        is_there = path.exists()
        failure = None if is_there else Failure("missing", "no such file")
        host_bytes = slabs_bytes(path) if is_there else 0
        self._done.put(Fetched(ref.object_key, failure, was_there=True, host_bytes=host_bytes))


def make_disk_engine(
    device: Device,
    config: DecoderConfig,
    form: PackedForm,
    weights: dict[str, torch.Tensor],
    folder: Path,
    num_slabs: int | None = None,
    num_swap_slots: int = 0,
    reference: Reference | None = None,
    precision: float = 0.05,
    host_cache_bytes: int = 64 << 20,
    switches: Mapping[str, Any] = MappingProxyType({}),
    **limits: int,
) -> EngineCore:
    """Make an engine whose adapters lie in folder/cache.

    num_slabs: slabs of its arena; None for as many as fit on the device.
    switches: fields of EngineConfig.   limits: fields of SchedulerConfig.
    """
    layout = form.layout
    in_dtype = {name: tensor.to(getattr(torch, form.dtype)) for name, tensor in weights.items()}
    arena_bytes = num_slabs and num_slabs * layout.slab_bytes
    settings = make_engine_config(folder, config, form, arena_bytes=arena_bytes, **limits)
    settings = replace(settings, **switches)
    backend = assemble(settings, config, form, in_dtype, device, ops)
    del in_dtype, weights
    loader = DiskLoader(
        folder / "cache", folder / "no.sock", form, backend.slabs, device=device,
        host_cache_bytes=host_cache_bytes,
    )  # fmt: skip
    residency = ResidencyConfig(host_cache_bytes=host_cache_bytes, arena_is_host=False)
    adapters = AdapterManager(Arena(len(backend.slabs)), loader, residency)
    costs = PreemptionCosts(copy_bytes_per_s=1e15)
    costs.note_prefill(1, 1.0)
    swap = SwapSpace(num_swap_slots, layout.slab_bytes, costs)
    words = [b""] * config.vocab_size
    scheduler = Scheduler(SchedulerConfig(**limits), layout, adapters, words, [], swap)
    runner = backend.make_runner(adapters.tables, TokenMeter(folder / "meter"), num_swap_slots)
    journal = Journal(folder / "journal", "eng-1", form.base_revision)
    return EngineCore(scheduler, runner, journal, reference, precision)
