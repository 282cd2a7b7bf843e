"""The engine's adapters: who wants which, who uses it, and what a step needs of it.

The manager is polled once a step and never waits. It decides; the loader (threads, and behind them
the fetcher process) does, and reports. An adapter in use is never evicted; one that fails fails its
own requests, and is tried again later where that can help. Moves between the tiers are
`lora.transitions`, which tier each adapter is in is `lora.tier_map`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic

from lora.arena import Arena
from lora.entry import Waiter
from lora.errors import Failure
from lora.eviction import Claim
from lora.loads import Loader, TablesT_co
from lora.pins import Pins
from lora.prefetches import Prefetches
from lora.residency_meter import ResidencyMeter
from lora.retries import Retries
from lora.tier_counts import TierCounts
from lora.transitions import Transitions
from registry.ref import AdapterRef


class AdapterManager(Generic[TablesT_co]):
    """Residency of all adapters of one engine; `entries` is in order of use, oldest first.

    An adapter goes by its object's key, so equal files of two tenants are two adapters here, too:
    what becomes of one tenant's object is nothing to the other.
    host_cache_bytes: packed adapters in host memory, those on their way to the arena included.
    disk_cache_bytes: the fetcher's quota, for the figures.
    arena_is_host: the arena is host memory (CPU), and an adapter is nowhere else in it.
    max_fetches: under way at the fetcher.   prefetch_per_tenant: wanted by nothing but a prefetch.
    max_pinned_share: of the arena's slabs.
    max_entries: adapters remembered; the oldest that nobody wants is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader[TablesT_co],
        *,
        host_cache_bytes: int = 256 << 20,
        disk_cache_bytes: int = 0,
        arena_is_host: bool = True,
        max_fetches: int = 8,
        prefetch_per_tenant: int = 4,
        max_pinned_share: float = 0.5,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.loader = loader
        self.clock = clock
        self.counts = TierCounts(0 if arena_is_host else host_cache_bytes, disk_cache_bytes)
        self.residency = ResidencyMeter(clock)
        self._retries = Retries(clock)
        self.transitions = Transitions(
            arena,
            loader,
            self.counts,
            self.residency,
            self._retries,
            Prefetches(prefetch_per_tenant),
            host_cache_bytes=host_cache_bytes,
            arena_is_host=arena_is_host,
            max_fetches=max_fetches,
            max_entries=max_entries,
        )
        self.tiers = self.transitions.tiers
        self.entries = self.tiers.entries
        self._tables = self.transitions.tables
        max_pinned_slabs = int(max_pinned_share * arena.num_slabs)
        self._pins = Pins(self.tiers, self.transitions, max_pinned_slabs)

    # ---- what requests ask for ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` to the tier before the arena; takes no slabs and evicts nobody else's."""
        self.transitions.prefetch(ref, tenant_id)

    def join(self, ref: AdapterRef, waiter: Waiter) -> None:
        """A request needs `ref` from now on, until it leaves: join its load, or start it."""
        entry = self.transitions.touch(ref, waiter.tenant_id)
        entry.claim = Claim(waiter.tenant_id, waiter.weight)
        self.counts.asked(entry)
        if entry.tier == "device":
            entry.num_hits += 1
        entry.waiters[waiter.request_id] = waiter
        self.transitions.hasten(entry, waiter)

    def leave(self, key: str, request_id: str) -> None:
        """That request has ended. A load that nobody waits for any more is dropped."""
        entry = self.entries[key]
        del entry.waiters[request_id]
        self.transitions.drop_if_unwanted(entry)

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Keep exactly these in the arena, as far as pins may take it, first come first."""
        self._pins.replace(refs)

    def wait(self, key: str) -> Failure | None:
        """Go on with its load, if it needs a push; or why it cannot be had at present."""
        entry = self.entries[key]
        self.transitions.advance(entry)
        return entry.failure if entry.tier == "failed" else None

    def retry_after_s(self, key: str) -> float:
        """Seconds after which it is worth asking again for what could not be had."""
        return self._retries.retry_after_s(self.entries[key])

    def is_ready(self, key: str) -> bool:
        return self.entries[key].tier == "device"

    def acquire(self, key: str) -> None:
        """One more request holds it: it stays in the arena until released."""
        self.tiers.acquire(self.entries[key])

    def release(self, key: str) -> None:
        self.tiers.release(self.entries[key])

    def slabs_needed(self, key: str) -> int | None:
        """Slabs that placing it takes now; 0 if it is there or coming, None if not packed yet."""
        entry = self.entries[key]
        if entry.tier in ("loading", "device"):
            return 0
        return entry.packed.num_slabs if entry.packed is not None else None

    def place(self, key: str) -> int:
        """Take slabs and start the copy into them; its bytes. The caller made room.

        Raises ArenaFull.
        """
        return self.transitions.place(self.entries[key])

    def tables(self, key: str) -> tuple[int, TablesT_co]:
        """(generation, tables) of an adapter in the arena."""
        return self._tables[key]

    def invocation_tokens(self, key: str) -> tuple[int, ...] | None:
        """From which prompt tokens on it applies (aLoRA), once it was in host memory; None: all."""
        return self.entries[key].invocation_tokens

    # ---- once a step ----

    def poll(self) -> None:
        """Take in what the loader has done since the last step, and give it more."""
        for done in self.loader.poll():
            self.transitions.take_in(done)
        self._pins.bring_in()
        self.transitions.start_next()

    @property
    def num_slabs_used(self) -> int:
        return self.tiers.num_slabs

    @property
    def num_slabs_pinned(self) -> int:
        return self._pins.num_slabs

    @property
    def num_evictions(self) -> int:
        return self.transitions.num_evictions

    @property
    def host_bytes(self) -> int:
        return self.transitions.host.used_bytes

    def check_integrity(self) -> None:
        self.transitions.check_integrity()
        self._pins.check_integrity()
