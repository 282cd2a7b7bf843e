"""One engine with several threads beside as many engines with one thread each, in turns."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from statistics import median

from bench.engine.chorale import Chorale
from bench.multi_lora import NUM_ADAPTERS
from bench.peers.measure import Plan, Row
from bench.peers.peer import Server, Setting
from bench.report import rounded
from bench.workload import BenchRequest

_NUM_ADAPTERS = NUM_ADAPTERS[2]


def compare(system: Chorale, plan: Plan, precision: str, threads: int) -> Row:
    """Serve the burst with `threads` engines at once, each its own copy, and with one engine.

    Rates are output tokens a second by the wall clock, medians of plan.repeats turns; the ratio is
    the median of the turns' ratios. Raises PeerFailed.
    """
    adapters = dict(islice(plan.checkpoint.adapters.items(), _NUM_ADAPTERS))
    requests = plan.burst.requests(plan.checkpoint, _NUM_ADAPTERS)
    with ExitStack() as stack:

        def start(name: str, num_threads: int) -> Server:
            folder = plan.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint = replace(plan.checkpoint, adapters=adapters)
            setting = Setting(
                checkpoint=checkpoint, precision=precision, threads=num_threads, folder=folder
            )
            return stack.enter_context(system.serving(setting))

        single = [start(f"single-{number}", 1) for number in range(threads)]
        shared = start("shared", threads)
        turns = [
            (_serve(single, requests), _serve([shared], requests)) for _ in range(plan.repeats)
        ]
    setup = {"system": system.system, "precision": precision, "threads": threads}
    errors = sum(one_errors + errors for (_, one_errors), (_, errors) in turns)
    result = {
        "side_by_side_tokens_per_s": rounded(median(rate for (rate, _), _ in turns)),
        "threads_tokens_per_s": rounded(median(rate for _, (rate, _) in turns)),
        "ratio": rounded(median(shared / single for (single, _), (shared, _) in turns)),
        "valid": not errors,
    }
    return "engine.threads", setup | plan.burst.setup(_NUM_ADAPTERS), result


def _serve(servers: Sequence[Server], requests: Sequence[BenchRequest]) -> tuple[float, int]:
    """(output tokens a second, failed requests) of all servers, each with the whole burst."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(servers)) as clients:
        outcomes = [o for found in clients.map(lambda s: s.serve(requests), servers) for o in found]
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    return num_tokens / (time.perf_counter() - start), sum(o.error is not None for o in outcomes)
