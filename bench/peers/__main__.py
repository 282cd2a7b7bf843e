"""`python -m bench.peers`: runs other systems on the burst of bench.multi_lora, a JSON line each.

The row of a peer that is not given or not installed says so. Exit status 1: a peer failed, or
answered as if adapters were dropped or swapped (`"valid": false`).

`python -m bench.peers plot ROWS... --out SVG` draws rows of this and of bench.engine.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers.llama_cpp import LlamaCpp
from bench.peers.measure import Row, measure
from bench.peers.openvino_peer import OpenVINO
from bench.peers.options import add_burst_options, make_plan
from bench.peers.peer import Peer
from bench.peers.rows import write_rows
from bench.peers.transformers_peft import TransformersPeft

_NAMES = ("peft", "openvino", "llama")


def main() -> None:
    if sys.argv[1:2] == ["plot"]:
        # Imported here, since measuring does not need matplotlib.
        from bench.peers.plot import main as plot

        plot(sys.argv[2:])
        return
    options = parse_options(sys.argv[1:])
    sys.exit(not write_rows(run(options), options.out))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_burst_options(parser)
    parser.add_argument(
        "--only", choices=_NAMES, action="append", help="run just this; may be repeated"
    )
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="interpreter with openvino-genai and optimum-intel"
    )
    parser.add_argument("--llama-server", type=Path, metavar="BINARY")
    parser.add_argument(
        "--llama-convert",
        type=Path,
        metavar="FOLDER",
        help="folder of llama.cpp's convert_*_to_gguf.py",
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each row as soon as it is measured."""
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
        plan = make_plan(options, Path(temporary))
        for peer in present:
            yield from measure(peer, plan)


if __name__ == "__main__":
    main()
