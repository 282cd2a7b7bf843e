"""Moves of adapters between tiers: what a loader is asked for, and what it reports of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lora.entry import Packed
from lora.errors import Failure
from registry.ref import AdapterRef

TablesT_co = TypeVar("TablesT_co", covariant=True)
"""What steps need to know of an adapter that is in the arena; residency keeps it unread."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The adapter under `key` is on disk, or could not be fetched.

    was_there: on disk already.   seconds, size_bytes: what the download took, where there was one.
    used_bytes: of the disk cache.   host_bytes: that the adapter takes in host memory outside the
    arena.
    """

    key: str
    failure: Failure | None = None
    was_there: bool = False
    seconds: float = 0.0
    size_bytes: int = 0
    used_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """The adapter under `key` is ready for the arena, or could not be read.

    seconds, size_bytes: what the read took.
    """

    key: str
    outcome: Packed | Failure
    seconds: float = 0.0
    size_bytes: int = 0

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


@dataclass(frozen=True, slots=True)
class Placed(Generic[TablesT_co]):
    """The adapter under `key` is in its slabs of the arena, or could not be copied there.

    outcome: its tables.   seconds, size_bytes: what the copy took.
    """

    key: str
    outcome: TablesT_co | Failure
    seconds: float = 0.0
    size_bytes: int = 0

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


Loaded = Fetched | Read | Placed[TablesT_co]


class Loader(Protocol[TablesT_co]):
    """Does what takes time. Every call returns at once; `poll` says what has been done since.

    fetch: store to disk; answered by one Fetched, also when dropped.   drop: nobody waits for a
    fetch any more.   load: make ready what is on disk, in host memory where the arena is not.
    place: into slabs of the arena.   release: what was loaded is needed in host memory no more.
    `place` and `release` are given what this loader has read.
    """

    def fetch(self, ref: AdapterRef) -> None: ...
    def drop(self, key: str) -> None: ...
    def load(self, ref: AdapterRef) -> None: ...
    def place(self, ref: AdapterRef, packed: Packed, slabs: list[int]) -> None: ...
    def release(self, packed: Packed) -> None: ...
    def poll(self) -> Sequence[Loaded[TablesT_co]]: ...
