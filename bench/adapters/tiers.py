"""The tiers of adapters as in production: a store, the fetcher's process, its disk cache."""

import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.in_process import EngineFactory
from bench.product import started
from engine.core import EngineCore
from lora.layout import PROJECTIONS, Layout

TARGETS = {"q,v": ("q_proj", "v_proj"), "all": PROJECTIONS}
"""Projections that have LoRA weights: PEFT's default for these models, and all of them."""

_MAX_FETCHES = 8  # the default of `chorale serve`
_START_S = 30.0
_LOOK_S = 0.01


def slabs_of(layout: Layout, rank: int, targets: Sequence[str]) -> int:
    """Return the number of slabs that an adapter of this rank on these projections takes."""
    indices = [PROJECTIONS.index(name) for name in targets]
    ranks = {(layer, p): rank for layer in range(layout.shape.num_layers) for p in indices}
    return layout.pack(ranks)[1]


@dataclass(frozen=True)
class Tiers:
    """A fetcher that runs.   socket: where it listens.   cache: folder that engines read."""

    socket: Path
    cache: Path

    def make_core(self, factory: EngineFactory, *, num_slabs: int, **settings: Any) -> EngineCore:
        """Make an engine that knows no adapter yet. settings: fields of EngineConfig."""
        return factory.make_cold(
            adapter_cache_dir=str(self.cache),
            fetcher_socket=str(self.socket),
            arena_bytes=num_slabs * factory.layout.slab_bytes,
            swap_bytes=0,
            **settings,
        )

    def forget(self) -> None:
        """Empty the disk cache, so that every adapter is in the store only."""
        for path in self.cache.glob("*.packed"):
            path.unlink(missing_ok=True)


@contextmanager
def fetching(
    folder: Path,
    storage_url: str,
    *,
    quota_bytes: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Tiers]:
    """Run the fetcher's process, its files under `folder`. quota_bytes: size of the disk cache."""
    tiers = Tiers(folder / "fetch.sock", folder / "cache")
    command = [
        sys.executable, "-m", "lora.fetch",
        "--socket", str(tiers.socket), "--storage", storage_url, "--cache", str(tiers.cache),
        "--quota-bytes", str(quota_bytes), "--max-fetches", str(_MAX_FETCHES),
    ]  # fmt: skip
    with started(command, folder / "fetch.log", dict(environment)) as process:
        until = time.monotonic() + _START_S
        while time.monotonic() < until and process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(tiers.socket)) == 0:
                    yield tiers
                    return
            time.sleep(_LOOK_S)
        raise SystemExit(f"the fetcher did not start: {(folder / 'fetch.log').read_text()}")
