"""The tiers of adapters as in production: a store, the fetcher's process, its disk cache."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adapters.fetcher import fetcher
from bench.in_process import DEVICE, DTYPE, THREADS, EngineFactory
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from lora.packed import PackedForm

BASE_REVISION = "bench"
ROOT = Path(__file__).parent.parent.parent
_DTYPE_NAME = str(DTYPE).removeprefix("torch.")


@dataclass(frozen=True)
class Tiers:
    """A fetcher that listens. cache: its folder, from which engines read."""

    folder: Path
    socket: Path
    cache: Path

    def make_core(self, factory: EngineFactory, *, num_slabs: int, **settings: Any) -> EngineCore:
        """Make an engine that knows no adapter yet. settings: fields of EngineConfig."""
        data_dir = self.folder / f"engine-{time.monotonic_ns()}"
        data_dir.mkdir()
        config = EngineConfig(
            data_dir=str(data_dir),
            model_dir=str(factory.model_dir),
            base_revision=BASE_REVISION,
            vocabulary_path="",
            eos_token_ids=(0,),
            adapter_cache_dir=str(self.cache),
            fetcher_socket=str(self.socket),
            device=DEVICE,
            dtype=_DTYPE_NAME,
            arena_bytes=num_slabs * factory.layout.slab_bytes,
            swap_bytes=0,
            speculation="off",  # random models repeat themselves
            threads=THREADS,
            **settings,
        )
        core, _ = build_core(config, data_dir.name, [])
        return core

    def forget(self) -> None:
        """Empties the disk cache, so that every adapter is in the store only."""
        for path in self.cache.glob("*.packed"):
            path.unlink(missing_ok=True)


def packed_form(factory: EngineFactory) -> PackedForm:
    """Return the packed form that engines made by `Tiers.make_core` use."""
    return PackedForm(factory.layout, _DTYPE_NAME, BASE_REVISION)


@contextmanager
def fetching(
    folder: Path,
    storage_url: str,
    *,
    quota_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Tiers]:
    """Runs the fetcher's process, its files under `folder`. quota_bytes: size of the disk cache."""
    tiers = Tiers(folder, folder / "fetch.sock", folder / "cache")
    with fetcher(
        tiers.socket, tiers.cache, storage_url, quota_bytes=quota_bytes, environment=environment
    ):
        yield tiers
