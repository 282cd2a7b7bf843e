"""Chorale's engine as a system on the burst; its worker speaks the same protocol as a peer's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.peers.peer import Setting
from bench.peers.worker import Worker, working


@dataclass
class Chorale:
    """Implements bench.peers.peer.Peer.   kernels, is_invariant: as in engine.config.EngineConfig.

    worker: the one that was started last.
    """

    kernels: str
    precisions: tuple[str, ...]
    is_invariant: bool = False
    worker: Worker | None = None

    @property
    def system(self) -> str:
        name = "C" if self.kernels == "native" else self.kernels
        return f"Chorale, {name}{', batch invariant' if self.is_invariant else ''}"

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The steps of the last burst, each (tokens, rows that chose a token)."""
        assert self.worker is not None
        return [(tokens, rows) for tokens, rows in self.worker.told["steps"]]

    def missing(self) -> str | None:
        return None

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Worker]:
        command = (sys.executable, "-m", "bench.engine.worker")
        settings = {"cpu_kernels": self.kernels, "batch_invariant": self.is_invariant}
        with working(command, setting, setting.checkpoint.model_dir, **settings) as self.worker:
            yield self.worker
