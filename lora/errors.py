"""Errors on an adapter's way to the arena.

LoraError
├── ArenaFull         too few slabs are free now: the others are in use
├── CacheInUse        another fetcher uses the disk cache (lora.disk_cache)
└── AdapterError      has a Failure: why this adapter is not available
"""

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "unavailable", "missing", "corrupt", "incompatible", "too_large", "evicted", "lost", "dropped"
]
"""Kinds of failures.

unavailable: the store, the disk or the fetcher failed; another attempt may help.
missing, corrupt: the store has no such object, or a different one under its key.
incompatible: not made for this base model, or not representable in the arena's dtype.
too_large: exceeds a limit.
evicted, lost: the packed file is gone from the disk cache, or damaged; it is fetched again.
dropped: no request waited for the adapter any more.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why an adapter is not available. error: a sentence for the log and the operator."""

    kind: FailureKind
    error: str


DROPPED = Failure("dropped", "no request waits for it any more")


class LoraError(Exception):
    """Base class of this package's errors."""


class ArenaFull(LoraError):
    """Fewer slabs are free than were requested; none was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted, self.free = wanted, free
        super().__init__(f"{wanted} slabs wanted, {free} free")


class AdapterError(LoraError):
    """An adapter cannot be loaded or used."""

    def __init__(self, kind: FailureKind, error: str) -> None:
        self.failure = Failure(kind, error)
        super().__init__(error)
