"""Chorale's engine as a system on the burst; its worker speaks the same protocol as a peer's."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.outcome import Outcome
from bench.peers.peer import Setting
from bench.peers.worker import Worker, working
from bench.workload import BenchRequest


@dataclass
class Chorale:
    """Implements bench.peers.peer.Peer.   kernels, is_invariant: as in engine.config.EngineConfig.

    in_processor_time: whether a token's time is in processor seconds of the engine.
    steps: the steps of the last burst, each (tokens, rows that chose a token).
    """

    kernels: str
    precisions: tuple[str, ...]
    is_invariant: bool = False
    in_processor_time: bool = False
    steps: list[tuple[int, int]] = field(default_factory=list)
    co_batched = True

    @property
    def system(self) -> str:
        name = "C" if self.kernels == "native" else self.kernels
        return f"Chorale, {name}{', batch invariant' if self.is_invariant else ''}"

    def missing(self) -> str | None:
        return None

    @contextmanager
    def serving(self, setting: Setting) -> Iterator["_Server"]:
        command = [sys.executable, "-m", "bench.engine.worker", "--kernels", self.kernels]
        command += ["--batch-invariant"] if self.is_invariant else []
        command += ["--processor-time"] if self.in_processor_time else []
        with working(command, setting, setting.checkpoint.model_dir) as worker:
            yield _Server(worker, self)


class _Server:
    """A bench.peers.peer.Server that notes the steps of a burst in its system."""

    def __init__(self, worker: Worker, system: Chorale) -> None:
        self.pid, self.version = worker.pid, worker.version
        self._worker = worker
        self._system = system

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        outcomes, told = self._worker.ask(requests)
        self._system.steps = [(tokens, rows) for tokens, rows in told["steps"]]
        return outcomes
