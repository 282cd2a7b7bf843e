"""transformers' `generate` with PEFT's mixed `adapter_names`: the peer, and the worker it runs in.

`python -m bench.peers.transformers_peft` is the other end of `bench.peers.worker`.
"""

import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import peft
import transformers

from bench.checkpoint import Checkpoint
from bench.peers.peer import Setting
from bench.peers.worker import Worker, working
from bench.peft_generate import PeftPeer
from bench.workload import BenchRequest


class TransformersPeft:
    """Implements bench.peers.peer.Peer."""

    system = "transformers + PEFT"
    precisions = ("float32",)

    def missing(self) -> str | None:
        return None

    def serving(self, setting: Setting) -> AbstractContextManager[Worker]:
        command = (sys.executable, "-m", "bench.peers.transformers_peft")
        return working(command, setting, setting.checkpoint.model_dir)


def main() -> None:
    # Libraries print to stderr from here on: stdout is for the protocol only.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    transformers.utils.logging.disable_progress_bar()
    peer = _load(json.loads(sys.stdin.readline()))
    version = f"transformers {transformers.__version__}, peft {peft.__version__}"
    out.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        requests = [BenchRequest(**fields) for fields in json.loads(line)["requests"]]
        outcomes = peer.run(requests)
        answers = [{"token_ids": o.token_ids, "token_s": o.chunk_s} for o in outcomes]
        out.write(json.dumps({"answers": answers}) + "\n")


def _load(job: dict[str, Any]) -> PeftPeer:
    adapters = {name: Path(folder) for name, folder in job["adapters"].items()}
    checkpoint = Checkpoint(Path(job["model_dir"]), adapters, vocab_size=0)
    peer = PeftPeer(checkpoint)
    peer.warm_up(checkpoint.models)
    return peer


if __name__ == "__main__":
    main()
