"""What can go wrong on an adapter's way to the arena.

LoraError
├── ArenaFull         not now: everything left is in use
└── AdapterError      with a Failure: why this adapter cannot be had
"""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "unavailable", "missing", "corrupt", "incompatible", "too_large", "evicted", "lost", "dropped"
]
"""unavailable: not now (the store, the disk, the fetcher); another try may help.
missing, corrupt: the store has no such object, or another one under its key.
incompatible: not of this base model, or not representable in its dtype.   too_large: for a limit.
evicted, lost: the disk cache has it no more, or damaged; to be fetched again.
dropped: nobody waited for it any more.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """error: a sentence for the log and the operator."""

    kind: FailureKind
    error: str


class LoraError(Exception):
    """The base of the tree."""


class ArenaFull(LoraError):
    """Fewer slabs are free than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted, self.free = wanted, free
        super().__init__(f"{wanted} slabs wanted, {free} free")


class AdapterError(LoraError):
    """An adapter cannot be had, or not be used."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        self.failure = Failure(kind, error)
        super().__init__(error)
