"""Measures the whole product: checkpoint, server, tenants, uploads, load, and then the peer."""

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import transformers

from bench import cpu_time
from bench.bound import Products
from bench.checkpoint import Checkpoint, make_checkpoint
from bench.measurement import WARM_UP_TOKENS, describe, measure, warm_up, workloads
from bench.outcome import Outcome
from bench.peft_generate import PeftPeer
from bench.product import Product, serving
from bench.report import first_token_share, match_share, rate, summarize
from bench.workload import Workload, make_requests

_BLOCK_SIZE = 16
_MAX_NUM_SEQS = 64  # the default of chorale serve on a CPU
_CHUNK_TOKENS = 128  # tokens of a step on a CPU, by default
_REQUEST_TIMEOUT_S = 900  # a burst on one core queues for longer than a client would wait

Row = tuple[dict[str, Any], dict[str, Any]]


def measure_stack(options: argparse.Namespace) -> list[Row]:
    """Return (setup, result) for every rate. Ours and then the peer run, never at the same time."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        transformers.utils.logging.disable_progress_bar()
        checkpoint = make_checkpoint(options.stack, folder / "checkpoint", options.adapters)
        planned = workloads(
            options, checkpoint.base_model, list(checkpoint.adapters), checkpoint.vocab_size
        )
        settings = _settings(checkpoint, options)
        with serving(settings, folder) as product:
            keys = _fill(product, checkpoint, options.tenants)
            warm_up(product.url, keys, list(keys), options)
            measured = [_measure(product, keys, workload, options) for workload in planned]
        for workload, (_, result) in zip(planned, measured, strict=True):
            if workload.rate == float("inf"):
                result["bound"] = _bound(checkpoint, workload, result, options)
        if options.against_peft:
            peer = PeftPeer(checkpoint, options.threads)
            peer.warm_up(list(keys))
            for workload, (outcomes, result) in zip(planned, measured, strict=True):
                result |= _compare(peer, workload, outcomes, result, options.peer_batch)
    del settings["model"]  # a temporary folder
    setup = {"tenants": options.tenants, "server": settings}
    return [
        (describe(workload) | setup, result)
        for workload, (_, result) in zip(planned, measured, strict=True)
    ]


def _settings(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, str | int | float]:
    """Return settings of `chorale serve`; those of --set win."""
    longest = max(options.prompt_tokens.high + options.output_tokens.high, WARM_UP_TOKENS)
    return {
        "model": str(checkpoint.model_dir),
        "device": "cpu",
        "dtype": "float32",
        "threads": options.threads,
        "max_model_len": _BLOCK_SIZE * (longest // _BLOCK_SIZE + 1),
        "arena_bytes": 2 << 30,
        "request_timeout_s": _REQUEST_TIMEOUT_S,
        "first_token_timeout_s": _REQUEST_TIMEOUT_S,
        "speculation": "off",  # random models repeat themselves: drafts would be right too often
    } | dict(options.settings)


def _fill(product: Product, checkpoint: Checkpoint, num_tenants: int) -> dict[str, str]:
    """Create tenants and share the adapters out among them. Returns the key for each model."""
    tenants = [product.create_tenant(f"tenant-{number}") for number in range(num_tenants)]
    keys = {checkpoint.base_model: tenants[0]}
    for number, (name, folder) in enumerate(checkpoint.adapters.items()):
        keys[name] = tenants[number % num_tenants]
        product.push_adapter(keys[name], name, folder)
    return keys


def _measure(
    product: Product, keys: dict[str, str], workload: Workload, options: argparse.Namespace
) -> tuple[list[Outcome], dict[str, Any]]:
    before = product.cpu_seconds()
    outcomes = measure(product.url, keys, workload, options)
    cpu_s = cpu_time.spent(before, product.cpu_seconds())
    result = summarize(outcomes, workload.base_model)
    result["cpu_s"] = cpu_s
    result["output_tokens_per_cpu_s"] = rate(result["output_tokens"], sum(cpu_s.values()))
    return outcomes, result


def _bound(
    checkpoint: Checkpoint, workload: Workload, result: dict[str, Any], options: argparse.Namespace
) -> dict[str, float | None]:
    """Return the time of the matrix products alone if all requests decoded together, and its share
    of the engine's time.
    """
    max_num_seqs = int(dict(options.settings).get("max_num_seqs", _MAX_NUM_SEQS))
    batch = min(workload.num_requests, max_num_seqs)
    num_steps = math.ceil(result["output_tokens"] / batch)
    chunks = math.ceil(result["prompt_tokens"] / _CHUNK_TOKENS)
    steps = [(_CHUNK_TOKENS, 0)] * chunks + [(batch, batch)] * num_steps
    products_s = Products(checkpoint.model_dir, options.threads).seconds(steps)
    engine_s = result["cpu_s"].get("engine")
    share = round(products_s / engine_s, 3) if engine_s else None
    return {"products_cpu_s": round(products_s, 2), "share_of_engine": share}


def _compare(
    peer: PeftPeer,
    workload: Workload,
    ours: list[Outcome],
    result: dict[str, Any],
    max_batch: int,
) -> dict[str, Any]:
    """Serve the same requests with the peer, and compare.

    match: share of requests with the same tokens.   ratio: ours to the peer's output tokens per
    second.
    """
    before = time.process_time()
    theirs = peer.run(make_requests(workload), max_batch)
    cpu_s = time.process_time() - before
    name = f"transformers {transformers.__version__} + peft {peft.__version__} generate"
    peers = {"name": name, **summarize(theirs, workload.base_model)}
    peers["cpu_s"] = round(cpu_s, 2)
    peers["output_tokens_per_cpu_s"] = rate(peers["output_tokens"], cpu_s)
    return {
        "peer": peers,
        "match": match_share(ours, theirs),
        "first_token_match": first_token_share(ours, theirs),
        "ratio": _ratio(result, peers, "output_tokens_per_s"),
        "ratio_per_cpu_s": _ratio(result, peers, "output_tokens_per_cpu_s"),
    }


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float | None:
    if not ours[name] or not theirs[name]:
        return None
    return round(ours[name] / theirs[name], 2)
