"""One adapter as the manager knows it: which tier it is in, who waits for it, who uses it."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from lora.errors import Failure
from lora.eviction import Claim
from registry.ref import AdapterRef

Tier = Literal["remote", "fetching", "disk", "host", "loading", "device", "failed"]


class Packed(Protocol):
    """An adapter that is ready for the arena.

    size_bytes: that it takes there.   host_bytes: in host memory beside it.
    """

    @property
    def digest(self) -> str: ...
    @property
    def num_slabs(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def invocation_tokens(self) -> tuple[int, ...] | None: ...


Urgency = tuple[int, int]
"""(class, arrival): less is more urgent."""

_LAST: Urgency = (1 << 30, 0)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that needs an adapter. priority: 0 before 1.   arrival: counts requests."""

    request_id: str
    tenant_id: str
    arrival: int
    priority: int = 0
    weight: float = 1.0

    @property
    def urgency(self) -> Urgency:
        return self.priority, self.arrival


@dataclass(slots=True, eq=False)
class Entry:
    """ref: whose object it is.   claim: for whom it is kept, the last one who asked.

    waiters: requests that need it and have not ended, by id.   users: those that hold it in the
    arena.   prefetched_by: the tenant, while nobody but a prefetch wants it.
    generation: counts its placements, so that a stale table is never mistaken.
    num_hits: requests that found it in the arena since it was placed.
    num_failures: in a row.   num_lost: times that its file was no more, or damaged, since it was
    last placed.   retry_at: before it, no other try.
    """

    ref: AdapterRef
    claim: Claim
    tier: Tier = "remote"
    waiters: dict[str, Waiter] = field(default_factory=dict)
    users: int = 0
    prefetched_by: str | None = None
    is_pinned: bool = False
    generation: int = 0
    num_hits: int = 0
    packed: Packed | None = None
    # Known since it was last fetched; 0 before.
    host_bytes: int = 0
    # Known since it was first read; 0 before.
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
    def is_wanted(self) -> bool:
        """Whether it is to come nearer."""
        return bool(self.waiters or self.users or self.is_pinned or self.prefetched_by)

    @property
    def is_idle(self) -> bool:
        """In the arena for nobody."""
        return self.tier == "device" and not self.users and not self.is_pinned

    @property
    def urgency(self) -> Urgency:
        """Of the first who waits for it; a mere prefetch comes last."""
        return min((waiter.urgency for waiter in self.waiters.values()), default=_LAST)
