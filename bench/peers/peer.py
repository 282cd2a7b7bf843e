"""The interface of all peers: a peer says what it lacks, is started, and serves a burst."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.checkpoint import Checkpoint
from bench.outcome import Outcome
from bench.workload import BenchRequest


class PeerFailed(Exception):
    """A peer did not convert, start or answer; str() ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that a peer is started with.

    checkpoint: model and adapters to load.   folder: for converted files, which are reused, and
    for logs.
    """

    checkpoint: Checkpoint
    precision: str
    folder: Path


class Server(Protocol):
    """A peer that is loaded and warm; all its processes descend from the process `pid`."""

    pid: int
    version: str

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        """Serve requests; return outcomes in the order of the requests. Raises PeerFailed."""
        ...


class Peer(Protocol):
    """A system to measure."""

    system: str
    precisions: tuple[str, ...]

    def missing(self) -> str | None:
        """Return what the peer lacks to be measured; None if it lacks nothing."""
        ...

    def serving(self, setting: Setting) -> AbstractContextManager[Server]:
        """Run the peer's server. Raises PeerFailed."""
        ...


def log_tail(log: Path) -> str:
    """Return the end of a peer's log, to say why the peer failed."""
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""
