"""Moves of adapters between tiers: the interface of a loader, and its reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lora.entry import Packed
from lora.errors import Failure
from registry.ref import AdapterRef

TablesT_co = TypeVar("TablesT_co", covariant=True)
"""Data by which steps apply an adapter in the arena; residency stores it without reading it."""

OutcomeT_co = TypeVar("OutcomeT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The adapter under `key` is on disk, or could not be fetched.

    was_there: it was on disk already.   seconds, size_bytes: time and size of the download, if any.
    used_bytes: bytes used in the disk cache.   host_bytes: bytes that the adapter takes in host
    memory outside the arena.
    """

    key: str
    failure: Failure | None = None
    was_there: bool = False
    seconds: float = 0.0
    size_bytes: int = 0
    used_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Moved(Generic[OutcomeT_co]):
    """An adapter was moved, or could not be. seconds, size_bytes: time and size of the move."""

    key: str
    outcome: OutcomeT_co | Failure
    seconds: float = 0.0
    size_bytes: int = 0

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


class Read(_Moved[Packed]):
    """The adapter under `key` is ready for the arena, or could not be read."""


class Placed(_Moved[TablesT_co]):
    """The adapter under `key` is in its slabs of the arena, or could not be copied there.

    outcome: its tables.
    """


Loaded = Fetched | Read | Placed[TablesT_co]


class Loader(Protocol[TablesT_co]):
    """Moves adapters in the background. Every call returns at once; `poll` returns the reports.

    fetch: bring an adapter from the store to disk; one Fetched answers it, also when dropped.
    drop: end a fetch that no request waits for any more.
    load: make an adapter on disk ready for the arena, in host memory if the arena is on a device.
    place: copy an adapter into slabs of the arena.   release: free an adapter's host memory.
    `place` and `release` take an adapter that this loader has read.
    """

    def fetch(self, ref: AdapterRef) -> None: ...
    def drop(self, key: str) -> None: ...
    def load(self, ref: AdapterRef) -> None: ...
    def place(self, ref: AdapterRef, packed: Packed, slabs: list[int]) -> None: ...
    def release(self, packed: Packed) -> None: ...
    def poll(self) -> Sequence[Loaded[TablesT_co]]: ...
