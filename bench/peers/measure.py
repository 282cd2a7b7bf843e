"""Measures each peer at each precision with each number of adapters, and one request alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import transformers

from bench import process_tree
from bench.checkpoint import Checkpoint
from bench.first_tokens import FirstTokens
from bench.measurement import Measurement, Row
from bench.multi_lora import NUM_ADAPTERS, Burst, burst_result
from bench.peers.peer import Peer, PeerFailed, Server, Setting
from bench.report import rounded
from bench.workload import Lengths

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
class Plan:
    """Setups to measure with every peer, and the inputs that they share.

    folder: holds conversions.   repeats: bursts, of which the one of median speed is the row.
    precisions: of a peer's, those to measure; empty for all.
    """

    burst: Burst
    checkpoint: Checkpoint
    first_tokens: FirstTokens
    num_adapters: Sequence[int]
    threads: int
    repeats: int
    folder: Path
    precisions: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class BurstMeasurement(Measurement):
    """A measurement of systems on the burst.

    adapters: numbers of distinct adapters.   precisions: forms of weights; empty for all.
    systems: those to measure; empty for all.   converted: folder that keeps converted models for
    the next run; empty for none.
    """

    told_apart: ClassVar = ("system", "precision", "threads", "model", "adapters", "requests")

    stack: str = Burst.stack
    requests: int = Burst.num_requests
    output_tokens: str = str(Burst.output_tokens)
    adapters: tuple[int, ...] = NUM_ADAPTERS
    threads: int = 1
    repeats: int = 1
    precisions: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    converted: str = ""

    def plan(self, folder: Path) -> Plan:
        """Make the plan. The checkpoint is made anew, always the same."""
        transformers.utils.logging.disable_progress_bar()
        burst = Burst(
            stack=self.stack,
            num_requests=self.requests,
            output_tokens=Lengths.parse(self.output_tokens),
        )
        checkpoint = burst.make_checkpoint(folder / "checkpoint")
        converted = Path(self.converted or folder) / f"{self.stack}-converted"
        converted.mkdir(parents=True, exist_ok=True)
        return Plan(
            burst=burst,
            checkpoint=checkpoint,
            first_tokens=FirstTokens(checkpoint, self.threads),
            num_adapters=self.adapters,
            threads=self.threads,
            repeats=self.repeats,
            folder=converted,
            precisions=self.precisions,
        )


def measure(peer: Peer, plan: Plan) -> Iterator[Row]:
    """Yield rows as they are measured; the row of a failure says so."""
    for precision in plan.precisions or peer.precisions:
        for count in plan.num_adapters if precision in peer.precisions else ():
            adapters = dict(islice(plan.checkpoint.adapters.items(), count))
            setting = Setting(
                checkpoint=replace(plan.checkpoint, adapters=adapters),
                precision=precision,
                threads=plan.threads,
                folder=plan.folder,
            )
            try:
                with peer.serving(setting) as server:
                    # The row that needs less memory comes first: a peak does not go down again.
                    if count == 0:
                        yield _row("peers.single", peer, server, _alone(plan), setting)
                    yield _row("peers", peer, server, plan, setting)
            except PeerFailed as failed:
                setup = _setup(peer, setting, plan)
                yield "peers", setup, {"failed": str(failed), "valid": False}


def _alone(plan: Plan) -> Plan:
    """Return a plan with one request of 200 prompt tokens, to time its first token and decoding."""
    return replace(plan, burst=replace(plan.burst, num_requests=1, prompt_tokens=Lengths(200, 200)))


def _row(bench: str, peer: Peer, server: Server, plan: Plan, setting: Setting) -> Row:
    requests = plan.burst.requests(plan.checkpoint, len(setting.checkpoint.adapters))
    likely = plan.first_tokens.likely(requests)
    results = []
    for _ in range(plan.repeats):
        before_s = process_tree.cpu_seconds(server.pid)
        outcomes = server.serve(requests)
        cpu_s = process_tree.cpu_seconds(server.pid) - before_s
        peak_rss_mb = process_tree.peak_rss_mb(server.pid)
        results.append(burst_result(outcomes, cpu_s, peak_rss_mb, likely))
    by_speed = sorted(results, key=lambda result: result["output_tokens_per_cpu_s"] or 0.0)
    result = by_speed[len(by_speed) // 2]
    result |= {
        # The first burst's peak: memory that a peer keeps between bursts must not count.
        "peak_rss_mb": results[0]["peak_rss_mb"],
        "runs": [result["output_tokens_per_cpu_s"] for result in results],
        "adapters_matter": rounded(plan.first_tokens.adapters_matter(requests)),
        "valid": all(_is_valid(result, setting.precision) for result in results),
    }
    return bench, _setup(peer, setting, plan) | {"version": server.version}, result


def _is_valid(result: dict[str, Any], precision: str) -> bool:
    min_near = _MIN_NEAR.get(precision, _MIN_NEAR_4_BITS)
    return not result["errors"] and result["first_token_near"] >= min_near


def _setup(peer: Peer, setting: Setting, plan: Plan) -> dict[str, Any]:
    return {
        "system": peer.system,
        "precision": setting.precision,
        "threads": setting.threads,
        "co_batched": peer.co_batched,
        **plan.burst.setup(len(setting.checkpoint.adapters)),
    }
