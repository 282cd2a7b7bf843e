"""One adapter as the manager knows it: which tier it is in, who waits for it, who uses it."""

from dataclasses import dataclass, field
from typing import Protocol

from lora.errors import Failure, FailureKind
from lora.eviction import Claim
from lora.heap_dict import HeapDict
from lora.tiers import LoadTier, Tier
from lora.transitions import State
from registry.ref import AdapterRef

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_MOST_DOUBLINGS = 5
_MOST_LOST: dict[FailureKind, int] = {"lost": 1, "evicted": 8}
"""Losses in a row that a new fetch may mend; more mean a faulty disk or far too small a cache."""


class Packed(Protocol):
    """An adapter that is ready for the arena.   size_bytes: bytes it takes there."""

    @property
    def digest(self) -> str: ...
    @property
    def num_slabs(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def invocation_tokens(self) -> tuple[int, ...] | None: ...


Urgency = tuple[int, int]
"""(priority, arrival) of a request; the smaller value is more urgent."""

_LAST: Urgency = (1 << 30, 0)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that needs an adapter.

    priority: 0 goes before 1.   arrival: the request's number in order of arrival.
    """

    request_id: str
    tenant_id: str
    arrival: int
    priority: int = 0
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class Entry:
    """Everything that the manager knows about one adapter.

    ref: the adapter's object.   claim: the tenant that it is kept for, the last one that asked.
    waiters: urgencies of the requests that need it and have not ended, by id.
    users: how many of them hold it in the arena.
    prefetched_by: the tenant of a prefetch, while no request wants the adapter.
    generation: counts its placements, so that stale tables are recognized.
    num_hits: requests that found it in the arena since it was placed.
    num_failures: failures in a row.   num_lost: how often its packed file was missing or damaged
    since the last placement or failure.   retry_at: no new attempt before this time.
    was_on_disk: whether its last fetch found it on disk.
    host_bytes: bytes it takes in host memory outside the arena, known once it was fetched.
    packed_bytes, num_slabs: known once it was read, 0 before.
    """

    ref: AdapterRef
    claim: Claim
    state: State = "remote"
    waiters: HeapDict[str, Urgency] = field(default_factory=HeapDict)
    users: int = 0
    prefetched_by: str | None = None
    is_pinned: bool = False
    generation: int = 0
    num_hits: int = 0
    packed: Packed | None = None
    was_on_disk: bool = False
    host_bytes: int = 0
    packed_bytes: int = 0
    num_slabs: int = 0
    invocation_tokens: tuple[int, ...] | None = None
    slabs: list[int] = field(default_factory=list)
    failure: Failure | None = None
    num_failures: int = 0
    num_lost: int = 0
    retry_at: float = 0.0

    @property
    def key(self) -> str:
        return self.ref.object_key

    @property
    def tier(self) -> Tier:
        return "disk" if self.state == "reading" else self.state

    @property
    def load_tier(self) -> LoadTier | None:
        """Tier that a load would begin at; None if the adapter is in the arena."""
        if self.state == "device":
            return None
        if self.packed is not None:
            return "host"
        return "disk" if self.tier == "disk" else "store"

    @property
    def is_wanted(self) -> bool:
        """Whether a request, a pin or a prefetch needs the adapter."""
        return bool(self.waiters or self.users or self.is_pinned or self.prefetched_by)

    @property
    def is_idle(self) -> bool:
        """Whether the adapter is in the arena, unused and not pinned: it may be evicted."""
        return self.state == "device" and not self.users and not self.is_pinned

    @property
    def urgency(self) -> Urgency:
        """Urgency of the most urgent waiter; a mere prefetch comes last."""
        return self.waiters[self.waiters.first()] if self.waiters else _LAST

    def hold(self, packed: Packed) -> None:
        """Note the copy in host memory, and what is known of the adapter since it was read."""
        self.packed, self.packed_bytes = packed, packed.size_bytes
        self.num_slabs = packed.num_slabs
        self.invocation_tokens = packed.invocation_tokens

    # ---- failures ----

    def lose(self, failure: Failure) -> bool:
        """Whether another fetch may mend this failure to use the packed file; then it counts."""
        if self.num_lost >= _MOST_LOST.get(failure.kind, 0):
            return False
        self.num_lost += 1
        return True

    def fail(self, failure: Failure, now: float) -> None:
        """Note why the adapter is not available; until `retry_at` its requests fail at once.

        A missing or damaged object may be uploaded again, so it is retried; an adapter that does
        not fit never will.
        """
        self.failure, self.num_lost = failure, 0
        if failure.kind in ("incompatible", "too_large"):
            self.retry_at = float("inf")
        else:
            wait_s = _FIRST_RETRY_S * 2 ** min(self.num_failures, _MOST_DOUBLINGS)
            self.retry_at = now + min(wait_s, _LONGEST_RETRY_S)
        self.num_failures += 1

    def is_due(self, now: float) -> bool:
        """Whether the adapter has failed, and may be tried again."""
        return self.state == "failed" and now >= self.retry_at

    def retry_after_s(self, now: float) -> float:
        """Seconds after which a request for an adapter that failed may be repeated."""
        return max(_FIRST_RETRY_S, self.retry_at - now)

    def forgive(self) -> None:
        """Forget the adapter's failures, since it has reached the arena."""
        self.failure, self.num_failures, self.num_lost = None, 0, 0
