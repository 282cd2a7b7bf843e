"""The way of an adapter as in production: a store, the fetcher's process, its disk cache."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.in_process import DEVICE, DTYPE, THREADS, EngineFactory
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from lora.packed import PackedForm

BASE_REVISION = "bench"
ROOT = Path(__file__).parent.parent.parent
_DTYPE_NAME = str(DTYPE).removeprefix("torch.")
_MAX_FETCHES = 8  # the default of `chorale serve`
_START_S = 30.0
_LOOK_S = 0.01


@dataclass(frozen=True)
class Tiers:
    """A fetcher that listens. cache: its folder, where engines read."""

    folder: Path
    socket: Path
    cache: Path

    def make_core(self, factory: EngineFactory, *, num_slabs: int, **settings: Any) -> EngineCore:
        """An engine that knows no adapter yet. settings: of engine.config.EngineConfig."""
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
            threads=THREADS,
            **settings,
        )
        core, _ = build_core(config, data_dir.name, [])
        return core

    def forget(self) -> None:
        """Everything is in the store only, from now on."""
        for path in self.cache.glob("*.packed"):
            path.unlink(missing_ok=True)


def packed_form(factory: EngineFactory) -> PackedForm:
    """Of the engines that `Tiers.make_core` makes."""
    return PackedForm(factory.layout, _DTYPE_NAME, BASE_REVISION)


@contextmanager
def fetching(
    folder: Path,
    storage_url: str,
    *,
    quota_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Tiers]:
    """`python -m lora.fetch`, with its files under `folder`. quota_bytes: of the disk cache."""
    tiers = Tiers(folder, folder / "fetch.sock", folder / "cache")
    command = [
        sys.executable, "-m", "lora.fetch",
        "--socket", str(tiers.socket),
        "--storage", storage_url,
        "--cache", str(tiers.cache),
        "--quota-bytes", str(quota_bytes),
        "--max-fetches", str(_MAX_FETCHES),
    ]  # fmt: skip
    fetcher = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})})
    try:
        _wait_until_listening(fetcher, tiers.socket)
        yield tiers
    finally:
        fetcher.kill()
        fetcher.wait()


def _wait_until_listening(fetcher: subprocess.Popen[bytes], path: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and fetcher.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(_LOOK_S)
    raise SystemExit("the fetcher did not start")
