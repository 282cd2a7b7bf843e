"""A peer in a Python process of its own; both sides send lines of JSON, one object each.

The worker is sent {"model_dir", "base_model", "adapters": {name: folder}, "precision", "threads",
"settings"} and answers {"version"} when it is loaded and warm. Then it answers every line
{"requests": [{"index", "model", "prompt_token_ids", "max_tokens", "due_s"}]} with {"answers":
[{"token_ids", "token_s"}]}; times count from the start of the burst. It ends when its input does.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.checkpoint import THREADS
from bench.outcome import Outcome
from bench.peers.peer import PeerFailed, Setting, log_tail
from bench.workload import BenchRequest

_ROOT = Path(__file__).parent.parent.parent
_STOP_TIMEOUT_S = 30.0


class Worker:
    """Implements bench.peers.peer.Server by a worker process.   told: its last answer."""

    def __init__(self, process: subprocess.Popen[str], log: Path, model_dir: Path) -> None:
        self.pid = process.pid
        self.version = ""
        self.told: dict[str, Any] = {}
        self._process = process
        self._log = log
        self._model_dir = model_dir

    def load(self, setting: Setting, settings: Mapping[str, Any]) -> None:
        checkpoint = setting.checkpoint
        job = {
            "model_dir": str(self._model_dir),
            "base_model": checkpoint.base_model,
            "adapters": {name: str(folder) for name, folder in checkpoint.adapters.items()},
            "precision": setting.precision,
            "threads": THREADS,
            "settings": settings,
        }
        self.version = self._ask(job)["version"]

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        self.told = self._ask({"requests": [asdict(request) for request in requests]})
        answers = self.told["answers"]
        return [
            request.outcome(answer["token_ids"], answer["token_s"])
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise PeerFailed(f"the worker ended: {log_tail(self._log)}") from None


@contextmanager
def working(
    command: Sequence[str], setting: Setting, model_dir: Path, **settings: Any
) -> Iterator[Worker]:
    """Run `command` as a worker and load it; it ends with the context. Raises PeerFailed."""
    log = setting.folder / "worker.log"
    threads = {"OMP_NUM_THREADS": str(THREADS)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=os.environ | threads, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
        )  # fmt: skip
    try:
        worker = Worker(process, log, model_dir)
        worker.load(setting, settings)
        yield worker
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
