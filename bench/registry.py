"""`python -m bench.registry`: a large upload through the gateway into a bucket beside copying its
file there, on `chorale serve`, by the client of the command line.

An upload is bounded by the store, then by the disk, to which a file is written four times on its
way: as parts, assembled, as the canonical object, and packed by the fetcher.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.adapters.s3_server import STORAGE_URL, S3Server, slow_s3
from bench.checkpoint import save_adapter
from bench.in_process import EngineFactory, EngineMeasurement
from bench.measurement import Figures, main
from bench.product import Product, serving
from bench.report import rate, ratio, rounded
from server.client.http import Answer, Client
from server.client.progress import Stage, Watcher
from server.client.uploads import Uploader


@dataclass(frozen=True, kw_only=True)
class Upload(EngineMeasurement):
    """The speed of uploads of a large adapter.

    repeats: turns, each an upload of new weights and a plain copy.
    """

    stack: str = "smollm2-135m"
    rank: int = 256
    repeats: int = 3
    arena_bytes: int = 4 << 30

    def run(self, factory: EngineFactory) -> Figures:
        settings = {
            "model": str(factory.model_dir), "device": "cpu", "dtype": "float32", "threads": 1,
            "max_model_len": 1024, "max_num_seqs": 16, "arena_bytes": self.arena_bytes,
            "storage": STORAGE_URL,
        }  # fmt: skip
        adapters = [factory.folder / f"adapter-{number}" for number in range(self.repeats + 1)]
        for seed, adapter in enumerate(adapters):
            save_adapter(self.stack, adapter, self.rank if seed else 1, seed)
        with (
            slow_s3(delay_s=0.0) as server,
            serving(settings, factory.folder, server.environment) as product,
        ):
            key = product.create_tenant("bench")
            _push(product, key, adapters[0])  # warms up
            turns = [_turn(product, key, adapter, server) for adapter in adapters[1:]]
        transfer_s, completion_s, proof_s, copy_s = map(median, zip(*turns, strict=True))
        total_s = median(turn[0] + turn[1] for turn in turns)
        size_mb = sum(p.stat().st_size for p in adapters[1].iterdir() if p.suffix != ".md") / 1e6
        return {
            "size_mb": rounded(size_mb),
            "copy_mb_per_s": rate(size_mb, copy_s),
            "transfer_mb_per_s": rate(size_mb, transfer_s),
            "total_mb_per_s": rate(size_mb, total_s),
            "transfer_to_copy": ratio(transfer_s, copy_s),
            "total_to_copy": ratio(total_s, copy_s),
            "seconds": {
                "copy": rounded(copy_s),
                "transfer": rounded(transfer_s),
                "completion": rounded(completion_s),
                "of_it_proof": rounded(proof_s),
            },
        }


def _turn(product: Product, key: str, adapter: Path, server: S3Server) -> tuple[float, ...]:
    """Return the seconds of an upload, and those of a plain copy of its file."""
    os.sync()  # so that the upload does not wait for earlier writes, nor the copy for its own
    pushed = _push(product, key, adapter)
    os.sync()
    started = time.perf_counter()
    server.put("bench/copy", (adapter / "adapter_model.safetensors").read_bytes())
    return (*pushed, time.perf_counter() - started)


def _push(product: Product, key: str, folder: Path) -> tuple[float, float, float]:
    """Upload an adapter; return seconds, without computing digests before it.

    They are of the transfer, from the request that opens the upload to the last part's
    acknowledgement; of the completion (assemble, check, store, prove, publish); and of its proof.
    """
    noted, client = _Noted(), _NotingClient(product.url, key)
    with client:
        upload = Uploader(client).push(folder.name, folder, watcher=noted).upload
    completion_s = time.perf_counter() - noted.checking
    proof_s = float(upload["version"]["passport"]["canary"]["seconds"])
    return noted.checking - client.first_asked, completion_s, proof_s


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


if __name__ == "__main__":
    main("bench.registry", {"registry.upload": Upload()}, __doc__)
