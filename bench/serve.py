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

from bench.bound import Products
from bench.checkpoint import Checkpoint, make_checkpoint
from bench.load import run_load
from bench.measurement import Figures, Measurement, Row, main
from bench.outcome import Outcome
from bench.peft_generate import PeftPeer
from bench.product import Product, serving
from bench.report import first_token_share, match_share, rate, rounded, summarize
from bench.workload import BenchRequest, Lengths, Workload, make_requests

ARENA_BYTES = 2 << 30
_BLOCK_SIZE = 16
_MAX_NUM_SEQS = 64  # the default of chorale serve on a CPU
_CHUNK_TOKENS = 128  # tokens of a step on a CPU, by default
_REQUEST_TIMEOUT_S = 900  # a burst on one core queues for longer than a client would wait
_WARM_UP_PROMPT = tuple(range(1, 33))
_WARM_UP_TOKENS = 4
_ANY_BATCH = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Serve(Measurement):
    """The product's figures at one load.

    stack: smollm2-135m, tiny or demo.   rate: requests per second, Poisson; inf: all at once.
    threads: of either side.   server: settings of `chorale serve`, which win over those here.
    """

    told_apart: ClassVar = ("model", "popularity", "rate", "requests")

    stack: str = "smollm2-135m"
    adapters: int = 16
    popularity: str = "uniform"
    rate: float = math.inf
    requests: int = 32
    prompt_tokens: str = "64:256"
    output_tokens: str = "64"
    seed: int = 0
    tenants: int = 1
    threads: int = 1
    against_peft: bool = False
    server: Mapping[str, str | int | float] = field(default_factory=dict)

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        transformers.utils.logging.disable_progress_bar()
        checkpoint = make_checkpoint(self.stack, folder / "checkpoint", self.adapters)
        requests = self.make_requests(checkpoint)
        settings = self._settings(checkpoint)
        with serving(settings, folder) as product:
            keys = self._fill(product, checkpoint)
            _send(product, keys, [_warm_up(index, model) for index, model in enumerate(keys)])
            outcomes, result = _measure(product, keys, requests, checkpoint.base_model)
        if self.rate == math.inf:
            result["bound"] = self._bound(checkpoint, result)
        if self.against_peft:
            result |= _compare(PeftPeer(checkpoint, self.threads), requests, outcomes, result)
        del settings["model"]  # a temporary folder
        setup = {
            "model": checkpoint.base_model,
            "adapters": len(checkpoint.adapters),
            "popularity": self.popularity,
            "rate": str(self.rate) if self.rate == math.inf else self.rate,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seed": self.seed,
            "tenants": self.tenants,
            "server": settings,
        }
        yield bench, setup, result

    def make_requests(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        return make_requests(
            Workload(
                base_model=checkpoint.base_model,
                models=tuple(checkpoint.adapters),
                popularity=self.popularity,
                rate=self.rate,
                num_requests=self.requests,
                prompt_tokens=Lengths.parse(self.prompt_tokens),
                output_tokens=Lengths.parse(self.output_tokens),
                vocab_size=checkpoint.vocab_size,
                seed=self.seed,
            )
        )

    def _settings(self, checkpoint: Checkpoint) -> dict[str, str | int | float]:
        lengths = Lengths.parse(self.prompt_tokens), Lengths.parse(self.output_tokens)
        longest = max(sum(each.high for each in lengths), len(_WARM_UP_PROMPT) + _WARM_UP_TOKENS)
        return {
            "model": str(checkpoint.model_dir),
            "device": "cpu",
            "dtype": "float32",
            "threads": self.threads,
            "max_model_len": _BLOCK_SIZE * (longest // _BLOCK_SIZE + 1),
            "arena_bytes": ARENA_BYTES,
            "request_timeout_s": _REQUEST_TIMEOUT_S,
            "first_token_timeout_s": _REQUEST_TIMEOUT_S,
            "speculation": "off",  # random models repeat themselves
        } | dict(self.server)

    def _fill(self, product: Product, checkpoint: Checkpoint) -> dict[str, str]:
        """Create tenants and share the adapters out among them. Returns the key for each model."""
        tenants = [product.create_tenant(f"tenant-{number}") for number in range(self.tenants)]
        keys = {checkpoint.base_model: tenants[0]}
        for number, (name, folder) in enumerate(checkpoint.adapters.items()):
            keys[name] = tenants[number % self.tenants]
            product.push_adapter(keys[name], name, folder)
        return keys

    def _bound(self, checkpoint: Checkpoint, result: Figures) -> dict[str, float | None]:
        """Return the time of the matrix products alone if all requests decoded together, and its
        share of the engine's time.
        """
        batch = min(self.requests, int(self.server.get("max_num_seqs", _MAX_NUM_SEQS)))
        num_steps = math.ceil(result["output_tokens"] / batch)
        chunks = math.ceil(result["prompt_tokens"] / _CHUNK_TOKENS)
        steps = [(_CHUNK_TOKENS, 0)] * chunks + [(batch, batch)] * num_steps
        products_s = Products(checkpoint.model_dir, self.threads).seconds(steps)
        share = rate(products_s, result["cpu_s"].get("engine", 0.0))
        return {"products_cpu_s": rounded(products_s), "share_of_engine": share}


def _warm_up(index: int, model: str) -> BenchRequest:
    return BenchRequest(index, model, _WARM_UP_PROMPT, _WARM_UP_TOKENS, 0.0)


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
    theirs = peer.run(requests, _ANY_BATCH)
    cpu_s = time.process_time() - before
    name = f"transformers {transformers.__version__} + peft {peft.__version__} generate"
    peers = {"name": name, **summarize(theirs, peer.base_model)}
    peers["cpu_s"] = rounded(cpu_s)
    peers["output_tokens_per_cpu_s"] = rate(peers["output_tokens"], cpu_s)
    return {
        "peer": peers,
        "match": match_share(ours, theirs),
        "first_token_match": first_token_share(ours, theirs),
        "ratio": _ratio(result, peers, "output_tokens_per_s"),
        "ratio_per_cpu_s": _ratio(result, peers, "output_tokens_per_cpu_s"),
    }


def _ratio(ours: Figures, theirs: Figures, name: str) -> float | None:
    return round(ours[name] / theirs[name], 2) if ours[name] and theirs[name] else None


if __name__ == "__main__":
    main("bench.serve", {"serve": Serve()}, __doc__)
