"""What every peer has in common: it is asked what it lacks, is started, and serves a burst."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.checkpoint import Checkpoint
from bench.outcome import Outcome
from bench.workload import BenchRequest


class PeerFailed(Exception):
    """It did not convert, start or answer; str() ends with what it logged last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a peer is started with.

    checkpoint: its adapters are those to load.   folder: for what was converted, and for logs;
    what lies there is used again.
    """

    checkpoint: Checkpoint
    precision: str
    threads: int
    folder: Path


class Server(Protocol):
    """Loaded and warm, all of it below the process `pid`."""

    pid: int
    version: str

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        """In the order of the requests. Raises PeerFailed."""
        ...


class Peer(Protocol):
    """co_batched: whether requests of several adapters share a batch."""

    system: str
    precisions: tuple[str, ...]
    co_batched: bool

    def missing(self) -> str | None:
        """What there has to be and is not; None if it can be measured."""
        ...

    def serving(self, setting: Setting) -> AbstractContextManager[Server]:
        """Raises PeerFailed."""
        ...


def log_tail(log: Path) -> str:
    """The end of what a peer wrote, to say why it failed."""
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""
