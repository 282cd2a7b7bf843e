"""The engine in a process of its own, the other end of `bench.peers.worker`.

Answers also hold "steps": (tokens, rows that choose a token) of each step.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch

from bench.checkpoint import Checkpoint
from bench.engine.loaded import loaded_engine
from bench.step_log import StepLog
from bench.workload import BenchRequest


def main() -> None:
    # Libraries print to stderr from here on: stdout is for the protocol only.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO)
    job = json.loads(sys.stdin.readline())
    adapters = {name: Path(folder) for name, folder in job["adapters"].items()}
    checkpoint = Checkpoint(Path(job["model_dir"]), adapters, vocab_size=0)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        loaded_engine(checkpoint, Path(folder), job["precision"], **job["settings"]) as engine,
    ):
        log = StepLog.of(engine.core)
        out.write(json.dumps({"version": f"torch {torch.__version__}"}) + "\n")
        for line in sys.stdin:
            log.steps.clear()
            outcomes = engine.serve([BenchRequest(**r) for r in json.loads(line)["requests"]])
            answers = [{"token_ids": o.token_ids, "token_s": o.chunk_s} for o in outcomes]
            out.write(json.dumps({"answers": answers, "steps": log.steps}) + "\n")


if __name__ == "__main__":
    main()
