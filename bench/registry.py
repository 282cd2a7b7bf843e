"""`python -m bench.registry`: a large upload beside copying its file to the same store, and the
time until a small one is served; on `chorale serve`, by the client of the command line.

Uploads are bounded by the store, then by the disk, to which a file is written four times on its way
through the gateway: as parts, assembled, as the canonical object, and packed by the fetcher.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import boto3
from botocore.config import Config

from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.checkpoint import save_adapter
from bench.in_process import EngineFactory, EngineMeasurement
from bench.load import run_load
from bench.measurement import Figures, main
from bench.product import Product, serving
from bench.report import rate, ratio, rounded
from bench.workload import BenchRequest
from registry.storage import LocalStorage
from server.client.http import Answer, Client
from server.client.progress import Stage, Watcher
from server.client.uploads import Uploader

_WARM_UP_RANK = 1
_KEY = "bench/copy"
_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
_TIMEOUT_S = 120.0

Copy = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Upload(EngineMeasurement):
    """The speed of uploads of a large adapter.

    ways: ways to upload, each to a store of _STORES.   repeats: turns, each an upload of new
    weights and a plain copy.
    """

    stack: str = "smollm2-135m"
    rank: int = 256
    repeats: int = 3
    ways: tuple[str, ...] = ("gateway to folder", "gateway to bucket", "presigned to bucket")
    arena_bytes: int = 4 << 30

    def run(self, factory: EngineFactory) -> Figures:
        return {way: self._measure(factory, way) for way in self.ways}

    def _measure(self, factory: EngineFactory, way: str) -> Figures:
        with (
            _STORES[way.rpartition(" ")[2]](factory.folder / f"{way}-copies") as store,
            _serve(
                factory, way, store.environment, arena_bytes=self.arena_bytes, **store.settings
            ) as product,
        ):
            key = product.create_tenant("bench")
            _push(product, key, _make_adapter(factory, _WARM_UP_RANK, seed=0))
            adapters = [_make_adapter(factory, self.rank, seed) for seed in range(self.repeats)]
            turns = [self._turn(product, key, adapter, way, store.copy) for adapter in adapters]
        pushed, copied_s = zip(*turns, strict=True)
        size_mb = sum(p.stat().st_size for p in adapters[0].iterdir() if p.suffix != ".md") / 1e6
        return {"size_mb": rounded(size_mb), **_speeds(size_mb, pushed, median(copied_s))}

    def _turn(
        self, product: Product, key: str, adapter: Path, way: str, copy: Copy
    ) -> tuple["_Pushed", float]:
        os.sync()  # so that the upload does not wait for earlier writes, nor the copy for its own
        pushed = _push(product, key, adapter, direct=way.startswith("presigned"))
        os.sync()
        started = time.perf_counter()
        copy(adapter / "adapter_model.safetensors")
        return pushed, time.perf_counter() - started


def _speeds(size_mb: float, pushed: tuple["_Pushed", ...], copy_s: float) -> Figures:
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
    yield _Store({}, {}, lambda path: storage.put(_KEY, path))


@contextmanager
def _bucket(_: Path) -> Iterator[_Store]:
    """Yield a bucket of an S3 server in its own process, in memory; boto3 copies."""
    with slow_s3(delay_s=0.0) as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            # Set as in the product's client: the newer checksums would be computed on both sides.
            config=Config(request_checksum_calculation="when_required"),
        )
        bucket = STORAGE_URL.removeprefix("s3://")
        yield _Store(
            {"storage": STORAGE_URL},
            server.environment,
            lambda path: client.upload_file(str(path), bucket, _KEY),
        )


_STORES = {"folder": _folder, "bucket": _bucket}


@dataclass(frozen=True, kw_only=True)
class Servable(EngineMeasurement):
    """The time from opening an upload to the adapter's first token, on an idle engine.

    The bound is the proof, which generates with the adapter and runs the same tokens through merged
    weights.
    """

    stack: str = "smollm2-135m"
    rank: int = 16
    repeats: int = 5
    arena_bytes: int = 1 << 30

    def run(self, factory: EngineFactory) -> Figures:
        with _serve(factory, "server", arena_bytes=self.arena_bytes) as product:
            key = product.create_tenant("bench")
            served = [self._serve_new(factory, product, key, n) for n in range(self.repeats + 1)]
        parts = served[1:]  # the first upload does not count
        return {"idle": {name: rounded(median(p[name] for p in parts)) for name in parts[0]}}

    def _serve_new(
        self, factory: EngineFactory, product: Product, key: str, seed: int
    ) -> dict[str, float]:
        """Return the seconds of each part. check: all of the completion but the engine's proof."""
        adapter = _make_adapter(factory, self.rank, seed)
        pushed = _push(product, key, adapter)
        request = BenchRequest(0, adapter.name, _PROMPT, max_tokens=1, due_s=0.0)
        (outcome,) = asyncio.run(run_load(product.url, {adapter.name: key}, [request], _TIMEOUT_S))
        if outcome.error:
            raise SystemExit(f"{adapter.name} is not served: {outcome.error}")
        return {
            "total_s": pushed.transfer_s + pushed.completion_s + outcome.ttft_s,
            "transfer_s": pushed.transfer_s,
            "check_s": pushed.completion_s - pushed.proof_s,
            "proof_s": pushed.proof_s,
            "first_token_s": outcome.ttft_s,
        }


@dataclass(frozen=True)
class _Pushed:
    """Seconds of an upload, without computing digests before it.

    transfer_s: from the request that opens the upload to the last part's acknowledgement.
    completion_s: assemble, check, store, prove, publish.   proof_s: of it the engine's proof.
    """

    transfer_s: float
    completion_s: float
    proof_s: float


def _push(product: Product, key: str, folder: Path, *, direct: bool = False) -> _Pushed:
    """Upload an adapter. direct: to the object store by URLs; else through the gateway."""
    noted, client = _Noted(), _NotingClient(product.url, key)
    with client:
        upload = Uploader(client).push(folder.name, folder, direct=direct, watcher=noted).upload
    completion_s = time.perf_counter() - noted.checking
    proof_s = float(upload["version"]["passport"]["canary"]["seconds"])
    return _Pushed(noted.checking - client.first_asked, completion_s, proof_s)


class _NotingClient(Client):
    """A client that notes the time of its first request."""

    first_asked = 0.0

    def ask(self, *request: Any, **options: Any) -> Answer:
        self.first_asked = self.first_asked or time.perf_counter()
        return super().ask(*request, **options)


class _Noted(Watcher):
    """A watcher that notes when all parts had been sent."""

    checking = 0.0

    def enter(self, stage: Stage) -> None:
        if stage == "checking":
            self.checking = time.perf_counter()


@contextmanager
def _serve(
    factory: EngineFactory,
    name: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: str | int,
) -> Iterator[Product]:
    """Run `chorale serve` on the factory's model. name: of its folder in the factory's."""
    folder = factory.folder / name.replace(" ", "-")
    folder.mkdir()
    given = {
        "model": str(factory.model_dir), "device": "cpu", "dtype": "float32", "threads": 1,
        "max_model_len": 1024, "max_num_seqs": 16, **settings,
    }  # fmt: skip
    with serving(given, folder, environment) as product:
        yield product


def _make_adapter(factory: EngineFactory, rank: int, seed: int) -> Path:
    """Make an adapter's folder as PEFT writes it. The same seed gives the same bytes."""
    folder = factory.folder / f"rank-{rank}-seed-{seed}"
    if not folder.exists():
        save_adapter(factory.stack, folder, rank, seed)
    return folder


MEASUREMENTS = {"registry.servable": Servable(), "registry.upload": Upload()}

if __name__ == "__main__":
    main("bench.registry", MEASUREMENTS, __doc__)
