"""Uploads of a large adapter, beside only copying the same file to the same store.

Uploads are bounded by the store, then by the disk, to which a file is written four times on its way
through the gateway: as parts, assembled, as the canonical object, and packed by the fetcher.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import boto3
from botocore.config import Config

from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.product import Product
from bench.registry.memory import PeakMemory, describe
from bench.registry.push import Pushed, push
from bench.registry.server import gateway_pid, make_adapter, serve, size_bytes
from bench.report import rate, ratio, rounded
from registry.storage import LocalStorage

_WARM_UP_RANK = 1
_KEY = "bench/copy"

Copy = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Upload(Experiment):
    """The speed of uploads of a large adapter.

    ways: ways to upload, each to a store of _STORES.   repeats: turns, each an upload of new
    weights and a plain copy.
    """

    stack: str = "smollm2-135m"
    rank: int = 256
    repeats: int = 3
    ways: tuple[str, ...] = ("gateway to folder", "gateway to bucket", "presigned to bucket")
    arena_bytes: int = 4 << 30

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        return {way: self._measure(factory, way) for way in self.ways}

    def _measure(self, factory: EngineFactory, way: str) -> dict[str, Any]:
        name = way.replace(" ", "-")
        with (
            _STORES[way.rpartition(" ")[2]](factory.folder / f"{name}-copies") as store,
            serve(
                factory, name, store.environment, arena_bytes=self.arena_bytes, **store.settings
            ) as product,
        ):
            key = product.create_tenant("bench")
            push(product, key, "warm-up", make_adapter(factory, _WARM_UP_RANK, seed=0))
            turns = [
                self._turn(product, key, make_adapter(factory, self.rank, seed), way, store.copy)
                for seed in range(self.repeats)
            ]
        pushed, copied_s, watched = zip(*turns, strict=True)
        size_mb = size_bytes(make_adapter(factory, self.rank, seed=0)) / 1e6
        return {
            "size_mb": rounded(size_mb),
            **_speeds(size_mb, pushed, median(copied_s)),
            "peak_rss_mb": describe(list(watched)),
        }

    def _turn(
        self, product: Product, key: str, adapter: Path, way: str, copy: Copy
    ) -> tuple[Pushed, float, PeakMemory]:
        os.sync()  # so that the upload does not wait for earlier writes, nor the copy for its own
        with PeakMemory(gateway_pid(product)) as memory:
            pushed = push(product, key, adapter.name, adapter, direct=way.startswith("presigned"))
        os.sync()
        started = time.perf_counter()
        copy(adapter / "adapter_model.safetensors")
        return pushed, time.perf_counter() - started, memory


def _speeds(size_mb: float, pushed: tuple[Pushed, ...], copy_s: float) -> dict[str, Any]:
    """Return medians. *_to_copy: time as a multiple of a plain copy's."""
    transfer_s = median(one.transfer_s for one in pushed)
    total_s = median(one.transfer_s + one.completion_s for one in pushed)
    return {
        "copy_mb_per_s": rate(size_mb, copy_s),
        "transfer_mb_per_s": rate(size_mb, transfer_s),
        "total_mb_per_s": rate(size_mb, total_s),
        "transfer_to_copy": ratio(transfer_s, copy_s),
        "total_to_copy": ratio(total_s, copy_s),
        "seconds": {
            "copy": rounded(copy_s),
            "transfer": rounded(transfer_s),
            "completion": rounded(median(one.completion_s for one in pushed)),
            "of_it_proof": rounded(median(one.proof_s for one in pushed)),
        },
    }


@dataclass(frozen=True)
class _Store:
    """A store. settings, environment: make the product use it.   copy: copies a file into it."""

    settings: Mapping[str, str]
    environment: Mapping[str, str]
    copy: Copy


@contextmanager
def _folder(copies: Path) -> Iterator[_Store]:
    """Yield the product's own store, in a folder; a copy is on the disk when `put` returns."""
    storage = LocalStorage(copies)

    def copy(path: Path) -> None:
        storage.put(_KEY, path)

    yield _Store({}, {}, copy)


@contextmanager
def _bucket(_: Path) -> Iterator[_Store]:
    """Yield a bucket of an S3 server in its own process, in memory; boto3 copies."""
    with slow_s3(delay_s=0.0) as server:
        environment = {**server.environment, "AWS_ENDPOINT_URL": server.upstream}
        client = boto3.client(
            "s3",
            endpoint_url=server.upstream,
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_DEFAULT_REGION"],
            # Set as in the product's client: the newer checksums would be computed on both sides.
            config=Config(request_checksum_calculation="when_required"),
        )
        bucket = STORAGE_URL.removeprefix("s3://")

        def copy(path: Path) -> None:
            client.upload_file(str(path), bucket, _KEY)

        yield _Store({"storage": STORAGE_URL}, environment, copy)


_STORES = {"folder": _folder, "bucket": _bucket}
