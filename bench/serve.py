"""`python -m bench.serve`: the whole product over HTTP, beside transformers + PEFT.

A checkpoint with random weights is made, `chorale serve` is started, tenants and keys are created,
adapters are uploaded, and every model is asked for a few tokens, so that nothing is cold. Then the
requests are sent, each when it is due. With `--set against_peft=True` the server is then stopped,
and PEFT's `generate` gets the same requests.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import peft
import transformers

from bench.checkpoint import THREADS, Checkpoint, make_checkpoint
from bench.load import run_load
from bench.measurement import Figures, Measurement, Row, main
from bench.outcome import Outcome
from bench.peft_generate import PeftPeer
from bench.product import Product, serving
from bench.report import match_share, rate, ratio, rounded, summarize
from bench.workload import BenchRequest, Lengths, Popularity, make_requests, warm_up_requests

_ARENA_BYTES = 2 << 30
_BLOCK_SIZE = 16
_WARM_UP_TOKENS = 48  # room for a request of warm_up_requests
_REQUEST_TIMEOUT_S = 900  # a burst on one core queues for longer than a client would wait


@dataclass(frozen=True, kw_only=True)
class Serve(Measurement):
    """The product's figures at one load.

    model: smollm2-135m, tiny or demo.   rate: requests per second, Poisson; inf: all at once.
    server: settings of `chorale serve`, which win over those here.
    """

    told_apart: ClassVar = ("model", "popularity", "rate", "requests")

    model: str = "smollm2-135m"
    adapters: int = 16
    popularity: Popularity = "uniform"
    rate: float = math.inf
    requests: int = 32
    prompt_tokens: str = "64:256"
    output_tokens: str = "64"
    seed: int = 0
    against_peft: bool = False
    server: Mapping[str, str | int | float] = field(default_factory=dict)

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        transformers.utils.logging.disable_progress_bar()
        checkpoint = make_checkpoint(self.model, folder / "checkpoint", self.adapters)
        requests = self._make_requests(checkpoint)
        settings = self._settings(checkpoint)
        with serving(settings, folder) as product:
            keys = _fill(product, checkpoint)
            _send(product, keys, warm_up_requests(keys))
            outcomes, result = _measure(product, keys, requests, checkpoint.base_model)
        if self.against_peft:
            result |= _compare(PeftPeer(checkpoint), requests, outcomes, result)
        del settings["model"]  # a temporary folder
        setup = self.setup() | {"adapters": len(checkpoint.adapters), "server": settings}
        setup["rate"] = str(self.rate) if self.rate == math.inf else self.rate
        yield bench, setup, result

    def _make_requests(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        return make_requests(
            checkpoint.base_model, tuple(checkpoint.adapters), checkpoint.vocab_size,
            self.requests, self.prompt_tokens, self.output_tokens,
            popularity=self.popularity, rate=self.rate, seed=self.seed,
        )  # fmt: skip

    def _settings(self, checkpoint: Checkpoint) -> dict[str, str | int | float]:
        lengths = Lengths.parse(self.prompt_tokens), Lengths.parse(self.output_tokens)
        longest = max(sum(each.high for each in lengths), _WARM_UP_TOKENS)
        return {
            "model": str(checkpoint.model_dir),
            "device": "cpu",
            "dtype": "float32",
            "threads": THREADS,
            "max_model_len": _BLOCK_SIZE * (longest // _BLOCK_SIZE + 1),
            "arena_bytes": _ARENA_BYTES,
            "request_timeout_s": _REQUEST_TIMEOUT_S,
            "first_token_timeout_s": _REQUEST_TIMEOUT_S,
            "speculation": "off",  # random models repeat themselves
        } | dict(self.server)


def _fill(product: Product, checkpoint: Checkpoint) -> dict[str, str]:
    """Create a tenant and its adapters. Returns the key for each model."""
    key = product.create_tenant("tenant")
    for name, folder in checkpoint.adapters.items():
        product.push_adapter(key, name, folder)
    return dict.fromkeys(checkpoint.models, key)


def _send(
    product: Product, keys: Mapping[str, str], requests: Sequence[BenchRequest]
) -> list[Outcome]:
    return asyncio.run(run_load(product.url, keys, requests, _REQUEST_TIMEOUT_S))


def _measure(
    product: Product, keys: Mapping[str, str], requests: Sequence[BenchRequest], base_model: str
) -> tuple[list[Outcome], Figures]:
    before = product.cpu_seconds()
    outcomes = _send(product, keys, requests)
    after = product.cpu_seconds()
    result = summarize(outcomes, base_model)
    result["cpu_s"] = {name: rounded(after[name] - before.get(name, 0.0)) for name in after}
    cpu_s = sum(result["cpu_s"].values())
    result["output_tokens_per_cpu_s"] = rate(result["output_tokens"], cpu_s)
    return outcomes, result


def _compare(
    peer: PeftPeer, requests: Sequence[BenchRequest], ours: Sequence[Outcome], result: Figures
) -> dict[str, Any]:
    """Serve the same requests with the peer, and compare.

    match: share of requests with the same tokens.   ratio: ours to the peer's output tokens per
    second.
    """
    peer.warm_up(sorted({request.model for request in requests}))
    before = time.process_time()
    theirs = peer.run(requests)
    cpu_s = time.process_time() - before
    name = f"transformers {transformers.__version__} + peft {peft.__version__} generate"
    peers = {"name": name, **summarize(theirs, peer.base_model)}
    peers["cpu_s"] = rounded(cpu_s)
    peers["output_tokens_per_cpu_s"] = rate(peers["output_tokens"], cpu_s)
    return {
        "peer": peers,
        "match": match_share(ours, theirs),
        "ratio": ratio(result["output_tokens_per_s"], peers["output_tokens_per_s"]),
        "ratio_per_cpu_s": ratio(
            result["output_tokens_per_cpu_s"], peers["output_tokens_per_cpu_s"]
        ),
    }


if __name__ == "__main__":
    main("bench.serve", {"serve": Serve()}, __doc__)
