"""Command-line options of the benchmarks on the burst, and the plan made from them."""

import argparse
from pathlib import Path

import transformers

from bench.checkpoint import SHAPES
from bench.first_tokens import FirstTokens
from bench.multi_lora import NUM_ADAPTERS, Burst
from bench.peers.measure import Plan
from bench.workload import Lengths


def add_burst_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", action="append", help="only weights in this form; may be repeated"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], help="threads of every system, in turn"
    )
    parser.add_argument("--repeats", type=int, default=1, help="bursts; the median one is the row")
    parser.add_argument(
        "--out", type=Path, help="file in which rows of the same setup are replaced"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep converted models here, and reuse those that are there"
    )
    parser.add_argument("--stack", choices=SHAPES, default=Burst.stack)
    parser.add_argument("--requests", type=int, default=Burst.num_requests)
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Burst.output_tokens)
    parser.add_argument(
        "--adapters", type=int, nargs="+", choices=NUM_ADAPTERS, default=NUM_ADAPTERS
    )


def make_plan(options: argparse.Namespace, temporary: Path) -> Plan:
    """Make the plan. The checkpoint is made anew, always the same; converted files can be kept."""
    transformers.utils.logging.disable_progress_bar()
    burst = Burst(
        stack=options.stack, num_requests=options.requests, output_tokens=options.output_tokens
    )
    checkpoint = burst.make_checkpoint(temporary / "checkpoint")
    folder = (options.folder or temporary) / f"{options.stack}-converted"
    folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        burst=burst,
        checkpoint=checkpoint,
        first_tokens=FirstTokens(checkpoint, max(options.threads)),
        num_adapters=options.adapters,
        precisions=options.precision,
        threads=options.threads,
        repeats=options.repeats,
        folder=folder,
    )
