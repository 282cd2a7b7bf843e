"""Measures a server at the loads that the options name, whether or not it was started here."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.load import run_load
from bench.outcome import Outcome
from bench.workload import Lengths, Workload, make_requests

_WARM_UP_PROMPT = Lengths(32, 32)
_WARM_UP_OUTPUT = Lengths(4, 4)
WARM_UP_TOKENS = _WARM_UP_PROMPT.high + _WARM_UP_OUTPUT.high
_WARM_UP_SEED = -1  # prompts that the measured run does not send again


def workloads(
    options: argparse.Namespace, base_model: str, models: Sequence[str], vocab_size: int
) -> list[Workload]:
    """Return a workload per rate; prompts differ, so that no cache helps the later workloads."""
    return [
        Workload(
            base_model=base_model,
            models=tuple(models),
            popularity=options.popularity,
            rate=rate,
            num_requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab_size=vocab_size,
            seed=options.seed + number,
        )
        for number, rate in enumerate(options.rate)
    ]


def warm_up(
    url: str, keys: Mapping[str, str], models: Sequence[str], options: argparse.Namespace
) -> None:
    """Ask for a few tokens of every model, so that the loading of adapters is not measured."""
    workload = Workload(
        base_model=models[0],
        models=tuple(models),
        popularity="distinct",
        rate=float("inf"),
        num_requests=len(models),
        prompt_tokens=_WARM_UP_PROMPT,
        output_tokens=_WARM_UP_OUTPUT,
        vocab_size=256,
        seed=_WARM_UP_SEED,
    )
    failed = [o.error for o in measure(url, keys, workload, options) if o.error]
    if failed:
        raise SystemExit(f"the warm-up failed: {', '.join(sorted(set(failed)))}")


def measure(
    url: str, keys: Mapping[str, str], workload: Workload, options: argparse.Namespace
) -> list[Outcome]:
    return asyncio.run(run_load(url, keys, make_requests(workload), options.timeout_s))


def describe(workload: Workload) -> dict[str, Any]:
    """Return the part of `setup` that does not depend on the server."""
    return {
        "model": workload.base_model,
        "adapters": len(workload.models),
        "popularity": workload.popularity,
        "rate": str(workload.rate) if workload.rate == float("inf") else workload.rate,
        "requests": workload.num_requests,
        "prompt_tokens": str(workload.prompt_tokens),
        "output_tokens": str(workload.output_tokens),
        "seed": workload.seed,
    }
