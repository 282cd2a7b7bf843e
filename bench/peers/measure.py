"""Measures each peer with the same burst at each precision and number of adapters, and with one
request alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import transformers

from bench import process_tree
from bench.checkpoint import THREADS, Checkpoint, make_checkpoint
from bench.first_tokens import FirstTokens
from bench.measurement import Figures, Measurement, Row
from bench.outcome import Outcome, gaps_between
from bench.peers.peer import Peer, PeerFailed, Server, Setting
from bench.report import percentiles_ms, rate, rounded, summarize
from bench.workload import BenchRequest, make_requests

# The headline is 16, two requests per adapter; with 32 no two requests share one; 0 is the base
# model.
_NUM_ADAPTERS = (0, 1, 16, 32)
_MIN_NEAR = {"float32": 0.95, "int8": 0.5, "q8_0": 0.5}
"""Least share of first tokens near the reference, by precision.

With the wrong adapter 1 % are near it. With the right one all are in float32 (30 of 32 equal it,
the others are near ties), and at least 24 of 32 with int8 weights.
"""
_MIN_NEAR_4_BITS = 0.1
"""The same with weights of 4 bits: random weights amplify their errors to 6 of 32, which is still
far from the 1 % of a wrong adapter.
"""


@dataclass(frozen=True, kw_only=True)
class BurstMeasurement(Measurement):
    """A measurement of systems with one burst: all requests come at 0 s; the answers are greedy and
    end only by their length. Only the models named in requests depend on the number of adapters.

    adapters: numbers of distinct adapters.   precisions: forms of weights; empty for all.
    systems: those to measure; empty for all.   repeats: bursts, of which the one of median speed is
    the row.   converted: folder that keeps converted models for the next run; empty for none.
    """

    told_apart: ClassVar = ("system", "precision", "threads", "model", "adapters", "requests")

    stack: str = "smollm2-135m"
    requests: int = 32
    prompt_tokens: str = "64:256"
    output_tokens: str = "64"
    adapters: tuple[int, ...] = _NUM_ADAPTERS
    repeats: int = 1
    precisions: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    converted: str = ""

    def bench(self, folder: Path) -> "BurstBench":
        """Make what all systems share. The checkpoint is made anew, always the same."""
        transformers.utils.logging.disable_progress_bar()
        checkpoint = make_checkpoint(self.stack, folder / "checkpoint", max(_NUM_ADAPTERS))
        converted = Path(self.converted or folder) / f"{self.stack}-converted"
        converted.mkdir(parents=True, exist_ok=True)
        return BurstBench(self, checkpoint, FirstTokens(checkpoint), converted)

    def make_requests(self, checkpoint: Checkpoint, num_adapters: int) -> list[BenchRequest]:
        """Make the requests; they name the first `num_adapters` adapters in turn."""
        return make_requests(
            checkpoint.base_model, tuple(checkpoint.adapters)[:num_adapters],
            checkpoint.vocab_size, self.requests, self.prompt_tokens, self.output_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class BurstBench:
    """A measurement and the inputs that all systems share.   folder: holds conversions."""

    plan: BurstMeasurement
    checkpoint: Checkpoint
    first_tokens: FirstTokens
    folder: Path

    def rows(self, peer: Peer, adapters: Sequence[int] | None = None) -> Iterator[Row]:
        """Yield rows as they are measured; the row of a failure says so.

        adapters: numbers of distinct adapters; None for the measurement's.
        """
        for precision in self.plan.precisions or peer.precisions:
            for count in adapters or self.plan.adapters if precision in peer.precisions else ():
                some = dict(islice(self.checkpoint.adapters.items(), count))
                setting = Setting(replace(self.checkpoint, adapters=some), precision, self.folder)
                try:
                    with peer.serving(setting) as server:
                        # The row that needs less memory comes first: a peak does not go down again.
                        if count == 0:  # one request alone, for its first token and decoding
                            alone = replace(self.plan, requests=1, prompt_tokens="200")
                            yield "peers.single", *self._row(peer, server, setting, alone)
                        yield "peers", *self._row(peer, server, setting, self.plan)
                except PeerFailed as failed:
                    setup = _setup(peer, setting, self.plan)
                    yield "peers", setup, {"failed": str(failed), "valid": False}

    def _row(
        self, peer: Peer, server: Server, setting: Setting, plan: BurstMeasurement
    ) -> tuple[Figures, Figures]:
        """Return setup and result."""
        requests = plan.make_requests(self.checkpoint, len(setting.checkpoint.adapters))
        likely = self.first_tokens.likely(requests)
        results = []
        for _ in range(plan.repeats):
            before_s = process_tree.cpu_seconds(server.pid)
            outcomes = server.serve(requests)
            cpu_s = process_tree.cpu_seconds(server.pid) - before_s
            peak_rss_mb = round(process_tree.peak_rss_mb(server.pid))
            figures = _result(outcomes, self.checkpoint.base_model, cpu_s, likely)
            results.append(figures | {"peak_rss_mb": peak_rss_mb})
        by_speed = sorted(results, key=lambda result: result["output_tokens_per_cpu_s"] or 0.0)
        result = by_speed[len(by_speed) // 2]
        result |= {
            # The first burst's peak: memory that a peer keeps between bursts must not count.
            "peak_rss_mb": results[0]["peak_rss_mb"],
            "runs": [result["output_tokens_per_cpu_s"] for result in results],
            "adapters_matter": rounded(self.first_tokens.adapters_matter(requests)),
            "valid": all(_is_valid(result, setting.precision) for result in results),
        }
        return _setup(peer, setting, plan) | {"version": server.version}, result


def _result(
    outcomes: Sequence[Outcome], base_model: str, cpu_s: float, likely: Sequence[Sequence[int]]
) -> Figures:
    """Return a row's `result`, in one form for all systems; failed answers count only as errors.

    likely: FirstTokens.likely of the requests.
    """
    result = summarize(outcomes, base_model)
    good = [outcome for outcome in outcomes if outcome.error is None]
    first = [outcome.token_ids[:1] for outcome in outcomes]
    equal = [said == (ids[0],) for said, ids in zip(first, likely, strict=True)]
    near = [said[0] in ids for said, ids in zip(first, likely, strict=True) if said]
    # While all requests decode together.
    start_s = max((outcome.chunk_s[0] for outcome in good), default=0.0)
    end_s = min((outcome.end_s for outcome in good), default=0.0)
    return result | {
        "cpu_s": rounded(cpu_s),
        "output_tokens_per_cpu_s": rate(result["output_tokens"], cpu_s),
        "tpot_ms": percentiles_ms(outcome.tpot_s for outcome in good)["p50"],
        "decode_step_ms": percentiles_ms(gaps_between(good, start_s, end_s))["p50"],
        "first_token_match": rounded(sum(equal) / len(outcomes)),
        "first_token_near": rounded(sum(near) / len(outcomes)),
    }


def _is_valid(result: dict[str, Any], precision: str) -> bool:
    min_near = _MIN_NEAR.get(precision, _MIN_NEAR_4_BITS)
    return not result["errors"] and result["first_token_near"] >= min_near


def _setup(peer: Peer, setting: Setting, plan: BurstMeasurement) -> Figures:
    return {
        "system": peer.system,
        "precision": setting.precision,
        "threads": THREADS,
        "model": plan.stack,
        "adapters": len(setting.checkpoint.adapters),
        "requests": plan.requests,
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
    }
