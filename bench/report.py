"""Rows from outcomes: percentiles, rates, and one JSON line that names commit and machine."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.outcome import Outcome

_ROOT = Path(__file__).parent.parent
_PRODUCT = ("engine", "kernels", "lora", "migrations", "registry", "server")


def summarize(outcomes: Sequence[Outcome], base_model: str) -> dict[str, Any]:
    """Return a row's `result`: latencies and tokens of requests that went well, errors by code."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max((o.end_s for o in outcomes), default=0.0)
    num_prompt = sum(o.num_prompt_tokens for o in good)
    num_output = sum(len(o.token_ids) for o in good)
    return {
        "requests": len(outcomes),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "duration_s": rounded(duration_s),
        "adapters_hit": len({o.model for o in good} - {base_model}),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tokens_per_s": rate(num_output, duration_s),
        "total_tokens_per_s": rate(num_prompt + num_output, duration_s),
        "ttft_ms": percentiles_ms(o.ttft_s for o in good),
        "itl_ms": percentiles_ms(gap for o in good for gap in o.gaps_s),
        "e2e_ms": percentiles_ms(o.e2e_s for o in good),
        "scheduler_lag_ms_p99": percentiles_ms(o.lag_s for o in outcomes)["p99"],
    }


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    """Return median and p99, linear between neighbours; None without samples."""
    values = list(seconds)
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": rounded(p50 * 1000), "p99": rounded(p99 * 1000)}


def rate(count: float, seconds: float) -> float | None:
    return rounded(count / seconds) if seconds > 0 else None


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def ratio(measured: float, beside: float) -> float:
    """Return the ratio of two figures that were measured in one run."""
    return rounded(measured / beside)


def match_share(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    """Return the share of requests whose tokens are all the same."""
    equal = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    return rounded(sum(equal) / len(equal))


def json_line(bench: str, device: str, setup: dict[str, Any], result: dict[str, Any]) -> str:
    """Return one row, in the form in which rows are committed under results/."""
    row = {
        "bench": bench,
        "commit": commit(),
        "device": device,
        "torch": importlib.metadata.version("torch"),
        "setup": setup,
        "result": result,
    }
    return json.dumps(row)


def describe_machine() -> str:
    """Return number and kind of the processors that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} vCPU {(names or [platform.machine()])[0]}"


def commit() -> str:
    """Return the measured commit, with `-dirty` if the product differs from it."""
    short = _git("rev-parse", "--short", "HEAD")
    if not short:
        return "unknown"
    return f"{short}-dirty" if _git("status", "--porcelain", "--", *_PRODUCT) else short


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ("git", *arguments), cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
