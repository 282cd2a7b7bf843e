"""The engine's adapters: which requests want and use them, and the tables that steps need.

The manager is polled once a step and never waits. It decides on moves; the loader (threads, and
behind them the fetcher process) carries them out and reports. An adapter in use is never evicted.
An adapter that cannot be loaded fails its own requests, and is tried again later if that can help.
`lora.transitions` has the moves between the tiers, `lora.tier_map` each adapter's tier.
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
from lora.tiers import LoadTier
from lora.transitions import Transitions
from registry.ref import AdapterRef


class AdapterManager(Generic[TablesT_co]):
    """Residency of all adapters of one engine; `entries` is in order of use, oldest first.

    The key of its object identifies an adapter, so equal files of two tenants are two adapters:
    what happens to one tenant's object does not affect the other.
    host_cache_bytes: limit of packed adapters in host memory, including those on their way to the
    arena.   disk_cache_bytes: the fetcher's quota, only reported in the figures.
    arena_is_host: the arena is host memory (CPU), so adapters have no second copy there.
    max_fetches: fetches under way.   prefetch_per_tenant: adapters of one tenant that only a
    prefetch wants.   max_pinned_share: share of the arena's slabs that pinned adapters may take.
    max_entries: adapters remembered; beyond it the oldest unwanted adapter is forgotten.
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

    # ---- for requests ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` to the tier before the arena, without taking slabs or evicting others'."""
        self.transitions.prefetch(ref, tenant_id)

    def join(self, ref: AdapterRef, waiter: Waiter) -> LoadTier | None:
        """Register a request that needs `ref` until it leaves; starts or joins the load.

        Returns where the adapter has to come from, as far as is known yet; None if it is in the
        arena. A fetch from the store may find it on disk: then `was_on_disk`.
        """
        entry = self.transitions.touch(ref, waiter.tenant_id)
        entry.claim = Claim(waiter.tenant_id, waiter.weight)
        self.counts.asked(entry)
        if entry.tier == "device":
            entry.num_hits += 1
        entry.waiters[waiter.request_id] = waiter
        load_tier = entry.load_tier
        self.transitions.hasten(entry, waiter)
        return load_tier

    def leave(self, key: str, request_id: str) -> None:
        """Remove a request that has ended; a load that no request waits for is dropped."""
        entry = self.entries[key]
        del entry.waiters[request_id]
        self.transitions.drop_if_unwanted(entry)

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Keep exactly these in the arena, in this order, as far as the limit for pins allows."""
        self._pins.replace(refs)

    def wait(self, key: str) -> Failure | None:
        """Queue the adapter's next move, if any; returns its failure if it has failed."""
        entry = self.entries[key]
        self.transitions.advance(entry)
        return entry.failure if entry.tier == "failed" else None

    def retry_after_s(self, key: str) -> float:
        """Seconds after which a request for an adapter that failed may be repeated."""
        return self._retries.retry_after_s(self.entries[key])

    def is_ready(self, key: str) -> bool:
        return self.entries[key].tier == "device"

    def is_fetched(self, key: str) -> bool:
        """Whether the adapter is on disk, or further on its way to the arena."""
        return self.entries[key].tier in ("disk", "host", "loading", "device")

    def was_on_disk(self, key: str) -> bool:
        """Whether the fetch of an adapter that is fetched found it on disk."""
        return self.entries[key].was_on_disk

    def acquire(self, key: str) -> None:
        """Count one more request that holds the adapter in the arena until it is released."""
        self.tiers.acquire(self.entries[key])

    def release(self, key: str) -> None:
        self.tiers.release(self.entries[key])

    def slabs_needed(self, key: str) -> int | None:
        """Slabs that placing it takes now: 0 if it has its slabs, None if it is not read yet."""
        entry = self.entries[key]
        if entry.tier in ("loading", "device"):
            return 0
        return entry.packed.num_slabs if entry.packed is not None else None

    def place(self, key: str) -> int:
        """Take slabs, for which the caller made room, and start the copy into them.

        Returns the bytes to copy. Raises ArenaFull.
        """
        return self.transitions.place(self.entries[key])

    def tables(self, key: str) -> tuple[int, TablesT_co]:
        """Generation and tables of an adapter in the arena."""
        return self._tables[key]

    def invocation_tokens(self, key: str) -> tuple[int, ...] | None:
        """Prompt tokens from which an activated LoRA applies; None for others, or before a read."""
        return self.entries[key].invocation_tokens

    # ---- once a step ----

    def poll(self) -> None:
        """Process the loader's reports since the last step, and give it more work."""
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
