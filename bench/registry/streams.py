"""Answers that stream all the while, to measure the effect of other work on them."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

from bench.load import run_load
from bench.product import Product
from bench.report import percentiles_ms
from bench.workload import Lengths, Workload, make_requests

_PROMPT_TOKENS = Lengths(32, 32)
_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Gap:
    """The time between two successive chunks of an answer; values of time.perf_counter()."""

    start: float
    end: float

    def overlaps(self, start: float, end: float) -> bool:
        return self.start < end and start < self.end


class Streams:
    """Streams `count` answers of the base model at once, one lot after the other, within a context.

    gaps: gaps of all answers, complete when the context has ended.
    """

    def __init__(
        self, product: Product, key: str, model: str, vocab_size: int, count: int, num_tokens: int
    ) -> None:
        self._url = product.url
        self._keys = {model: key}
        self._workload = Workload(
            base_model=model,
            models=(),
            popularity="none",
            rate=float("inf"),
            num_requests=count,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=Lengths(num_tokens, num_tokens),
            vocab_size=vocab_size,
            seed=0,
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.gaps: list[Gap] = []
        self.errors: list[str] = []

    def __enter__(self) -> "Streams":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        requests = make_requests(self._workload)
        while not self._is_over.is_set():
            start = time.perf_counter()
            for outcome in asyncio.run(
                run_load(self._url, self._keys, requests, _TIMEOUT_S, start=start)
            ):
                times = [start + second for second in outcome.chunk_s]
                self.gaps += [Gap(a, b) for a, b in zip(times, times[1:], strict=False)]
                if outcome.error:
                    self.errors.append(outcome.error)


def summarize(gaps: list[Gap]) -> dict[str, Any]:
    return {"gaps": len(gaps), **percentiles_ms(gap.end - gap.start for gap in gaps)}
