"""The burst that our engine and its peers are measured with: one model, many adapters at once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.checkpoint import Checkpoint, make_checkpoint
from bench.outcome import Outcome
from bench.report import rate, rounded
from bench.workload import BenchRequest, Lengths, Workload, make_requests

# The headline is 16, two requests per adapter; with 32 no two requests share one; 0 is the base
# model.
NUM_ADAPTERS = (0, 1, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Burst:
    """A burst: all requests come at 0 s; the answers are greedy and end only by their length.

    Only the models named in requests depend on the number of adapters.
    """

    stack: str = "smollm2-135m"
    num_requests: int = 32
    prompt_tokens: Lengths = Lengths(64, 256)
    output_tokens: Lengths = Lengths(64, 64)

    def make_checkpoint(self, folder: Path) -> Checkpoint:
        """Make a checkpoint with adapters for every variant, of ranks 8 and 16 in turn."""
        return make_checkpoint(self.stack, folder, max(NUM_ADAPTERS))

    def requests(self, checkpoint: Checkpoint, num_adapters: int) -> list[BenchRequest]:
        """Make the requests; they name the first `num_adapters` adapters in turn."""
        workload = Workload(
            base_model=checkpoint.base_model,
            models=tuple(checkpoint.adapters)[:num_adapters],
            popularity="distinct" if num_adapters else "none",
            rate=float("inf"),
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            vocab_size=checkpoint.vocab_size,
        )
        return make_requests(workload)

    def setup(self, num_adapters: int) -> dict[str, Any]:
        """Return the part of a row's `setup` that every system shares."""
        return {
            "model": self.stack,
            "adapters": num_adapters,
            "requests": self.num_requests,
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
        }


def burst_result(
    outcomes: Sequence[Outcome],
    cpu_s: float,
    peak_rss_mb: float,
    likely: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return a row's `result`, in one form for all systems; failed answers count only as errors.

    likely: FirstTokens.likely of the requests.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max((outcome.end_s for outcome in outcomes), default=0.0)
    num_output = sum(len(outcome.token_ids) for outcome in good)
    first = [outcome.token_ids[:1] for outcome in outcomes]
    equal = [said == (ids[0],) for said, ids in zip(first, likely, strict=True)]
    near = [said[0] in ids for said, ids in zip(first, likely, strict=True) if said]
    ttft_s = [outcome.ttft_s for outcome in good]
    return {
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "output_tokens": num_output,
        "duration_s": rounded(duration_s),
        "cpu_s": rounded(cpu_s),
        "output_tokens_per_cpu_s": rate(num_output, cpu_s),
        "output_tokens_per_s": rate(num_output, duration_s),
        "ttft_ms": {"p50": _ms(median(ttft_s)), "max": _ms(max(ttft_s))} if good else {},
        "tpot_ms": _ms(median(map(_tpot_s, good))) if good else None,
        "decode_step_ms": _decode_step_ms(good),
        "peak_rss_mb": round(peak_rss_mb),
        "first_token_match": rounded(sum(equal) / len(outcomes)),
        "first_token_near": rounded(sum(near) / len(outcomes)),
    }


def _tpot_s(outcome: Outcome) -> float:
    """Time from the first token to the last, divided by the number of tokens after the first."""
    elapsed_s = outcome.chunk_s[-1] - outcome.chunk_s[0]
    return elapsed_s / max(len(outcome.token_ids) - 1, 1)


def _decode_step_ms(outcomes: Sequence[Outcome]) -> float | None:
    """Return the median gap while all requests decode together; None if they never do."""
    start_s = max((outcome.chunk_s[0] for outcome in outcomes), default=0.0)
    end_s = min((outcome.end_s for outcome in outcomes), default=0.0)
    gaps_s = [
        after - before
        for outcome in outcomes
        for before, after in pairwise(outcome.chunk_s)
        if start_s <= before and after <= end_s
    ]
    return _ms(median(gaps_s)) if gaps_s else None


def _ms(seconds: float) -> float:
    return rounded(1000 * seconds)
