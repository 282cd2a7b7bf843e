"""`python -m bench.peers`: other systems on the burst of bench.multi_lora, a JSON line for each.

A peer that is not given or not installed is a row that says so. Exit status 1: a peer failed, or
answered as if adapters were dropped or swapped (`"valid": false`).

`python -m bench.peers plot ROWS... --out SVG` draws rows of this and of bench.engine.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers

from bench.checkpoint import SHAPES
from bench.first_tokens import FirstTokens
from bench.multi_lora import NUM_ADAPTERS, Burst
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.measure import Plan, Row, measure
from bench.peers.openvino_peer import OpenVINO
from bench.peers.peer import Peer
from bench.peers.rows import put_row
from bench.peers.transformers_peft import TransformersPeft
from bench.report import describe_machine, json_line
from bench.workload import Lengths

_NAMES = ("peft", "openvino", "llama")


def main() -> None:
    if sys.argv[1:2] == ["plot"]:
        # Only here: matplotlib is not needed to measure.
        from bench.peers.plot import main as plot

        plot(sys.argv[2:])
        return
    options = parse_options(sys.argv[1:])
    all_valid = True
    for bench, setup, result in run(options):
        line = json_line(bench, describe_machine(), setup, result) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if options.out:
            put_row(options.out, line)
        all_valid &= result.get("valid", True)
    sys.exit(not all_valid)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of every peer")
    parser.add_argument("--repeats", type=int, default=1, help="bursts; the median one is the row")
    parser.add_argument(
        "--out", type=Path, help="file in which rows of the same setup are replaced"
    )
    parser.add_argument("--only", choices=_NAMES, action="append", help="may be repeated")
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai, optimum-intel")
    parser.add_argument("--llama-server", type=Path, metavar="BINARY")
    parser.add_argument(
        "--llama-convert", type=Path, metavar="FOLDER", help="with llama.cpp's convert_*_to_gguf.py"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep what is converted here, and use what is there"
    )
    parser.add_argument("--stack", choices=SHAPES, default=Burst.stack)
    parser.add_argument("--requests", type=int, default=Burst.num_requests)
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Burst.output_tokens)
    parser.add_argument(
        "--adapters", type=int, nargs="+", choices=NUM_ADAPTERS, default=NUM_ADAPTERS
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Row by row, as they are measured."""
    peers: dict[str, Peer] = {
        "peft": TransformersPeft(),
        "openvino": OpenVINO(options.openvino),
        "llama": LlamaCpp(options.llama_server, options.llama_convert),
    }
    chosen = [peers[name] for name in options.only or _NAMES]
    present = []
    for peer in chosen:
        if missing := peer.missing():
            yield "peers", {"system": peer.system}, {"skipped": missing}
        else:
            present.append(peer)
    if not present:
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        plan = _plan(options, Path(temporary))
        for peer in present:
            yield from measure(peer, plan)


def _plan(options: argparse.Namespace, temporary: Path) -> Plan:
    """The checkpoint is made every time, the same; what peers make of it can be kept."""
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
        first_tokens=FirstTokens(checkpoint, options.threads),
        num_adapters=options.adapters,
        threads=options.threads,
        repeats=options.repeats,
        folder=folder,
    )


if __name__ == "__main__":
    main()
