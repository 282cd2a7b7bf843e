"""`python -m bench.peers`: other systems with the same burst for many adapters, on one thread each.

A system that is not given or not installed is left out, which is said on standard error. Exit
status 1: a peer failed, or answered as if adapters were dropped or swapped (`"valid": false`).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measurement import Row, main
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.measure import BurstMeasurement
from bench.peers.openvino_peer import OpenVINO
from bench.peers.peer import Peer
from bench.peers.transformers_peft import TransformersPeft


@dataclass(frozen=True, kw_only=True)
class Peers(BurstMeasurement):
    """Systems: peft, openvino, llama.

    openvino: interpreter with openvino-genai, optimum-intel and nncf.   llama_server: the binary.
    llama_convert: folder of llama.cpp's convert_*_to_gguf.py.
    """

    openvino: str = ""
    llama_server: str = ""
    llama_convert: str = ""

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        peers: dict[str, Peer] = {
            "peft": TransformersPeft(),
            "openvino": OpenVINO(self.openvino),
            "llama": LlamaCpp(Path(self.llama_server), Path(self.llama_convert)),
        }
        burst = None
        for name in self.systems or peers:
            if missing := peers[name].missing():
                sys.stderr.write(f"{name} is left out: {missing}\n")
                continue
            burst = burst or self.bench(folder)
            yield from burst.rows(peers[name])


if __name__ == "__main__":
    main("bench.peers", {"peers": Peers()}, __doc__)
