"""Time from opening an upload to the adapter's first token, alone and beside streaming answers.

The bounds are the proof, which generates with the adapter and runs the same tokens through merged
weights in the time that the engine has left; then the prompt of the first request.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.load import run_load
from bench.product import Product
from bench.registry.push import Pushed, push
from bench.registry.server import make_adapter, serve
from bench.registry.streams import Gap, Streams, summarize
from bench.report import ratio, rounded
from bench.workload import BenchRequest

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
_TIMEOUT_S = 120.0
_ARENA_BYTES = 1 << 30


@dataclass(frozen=True)
class _Served:
    """An upload, and the time of its adapter's first token."""

    pushed: Pushed
    first_token: float


@dataclass(frozen=True, kw_only=True)
class Servable(Experiment):
    """The time from opening an upload to the adapter's first token.

    num_streams: answers that stream beside the uploads.   quiet_s: time between two uploads, in
    which only the streams run.
    """

    stack: str = "smollm2-135m"
    rank: int = 16
    repeats: int = 5
    num_streams: int = 8
    stream_tokens: int = 128
    quiet_s: float = 5.0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        with serve(factory, "server", arena_bytes=_ARENA_BYTES) as product:
            key = product.create_tenant("bench")
            seeds = iter(range(2 * self.repeats + 1))
            self._serve_new(factory, product, key, next(seeds))  # the first upload does not count
            idle = [
                self._serve_new(factory, product, key, next(seeds)) for _ in range(self.repeats)
            ]
            beside = Streams(
                product, product.create_tenant("others"), factory.stack, factory.vocab_size,
                count=self.num_streams, num_tokens=self.stream_tokens,
            )  # fmt: skip
            adapters = [(seed, make_adapter(factory, self.rank, seed)) for seed in seeds]
            with beside:
                busy = []
                for seed, _ in adapters:
                    time.sleep(self.quiet_s)
                    busy.append(self._serve_new(factory, product, key, seed))
                time.sleep(self.quiet_s)
        return {
            "idle": _describe(idle),
            "beside_streams": {**_describe(busy), "streams": _noticed(beside, busy)},
        }

    def _serve_new(self, factory: EngineFactory, product: Product, key: str, seed: int) -> _Served:
        name = f"adapter-{seed}"
        pushed = push(product, key, name, make_adapter(factory, self.rank, seed))
        asked = time.perf_counter()
        request = BenchRequest(0, name, _PROMPT, max_tokens=1, due_s=0.0)
        (outcome,) = asyncio.run(
            run_load(product.url, {name: key}, [request], _TIMEOUT_S, start=asked)
        )
        if outcome.error:
            raise SystemExit(f"{name} is not served: {outcome.error}")
        return _Served(pushed, asked + outcome.chunk_s[0])


def _describe(served: Sequence[_Served]) -> dict[str, Any]:
    """Return median seconds of each part. check: all of the completion but the engine's proof."""
    parts = {
        "total": [one.first_token - one.pushed.opened for one in served],
        "transfer": [one.pushed.transfer_s for one in served],
        "check": [one.pushed.completion_s - one.pushed.proof_s for one in served],
        "proof": [one.pushed.proof_s for one in served],
        "first_token": [one.first_token - one.pushed.answered for one in served],
    }
    return {f"{name}_s": rounded(median(seconds)) for name, seconds in parts.items()}


def _noticed(streams: Streams, served: Sequence[_Served]) -> dict[str, Any]:
    """Return ITL in ms while nothing is uploaded, while an upload is sent, and while it is proved.

    A gap that is in two of these phases counts for the later phase.
    """
    if streams.errors:
        raise SystemExit(f"the streams failed: {', '.join(sorted(set(streams.errors)))}")
    quiet: list[Gap] = []
    sending: list[Gap] = []
    proving: list[Gap] = []
    for gap in streams.gaps:
        if any(gap.overlaps(one.pushed.sent, one.pushed.answered) for one in served):
            proving.append(gap)
        elif any(gap.overlaps(one.pushed.opened, one.pushed.sent) for one in served):
            sending.append(gap)
        elif not any(gap.overlaps(one.pushed.answered, one.first_token) for one in served):
            quiet.append(gap)
    without, beside = summarize(quiet), summarize(proving)
    return {
        "quiet_itl_ms": without,
        "sending_itl_ms": summarize(sending),
        "proving_itl_ms": beside,
        "proving_to_quiet": {
            name: ratio(beside[name], without[name]) if beside[name] else None
            for name in ("p50", "p99")
        },
    }
