"""The engine's adapters: what wants them (requests, pins, prefetches), and which requests use them.

The manager is polled once a step and never waits. It turns wishes into events; `lora.residency`
decides from them on moves, and the loader (threads, and behind them the fetcher process) carries
the moves out and reports. An adapter in use is never evicted. An adapter that cannot be loaded
fails its own requests, and is tried again later if that can help.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic

from lora.arena import Arena
from lora.entry import Entry, Waiter
from lora.errors import Failure
from lora.eviction import EVERYBODY, Claim
from lora.loads import Loader, TablesT_co
from lora.residency import ResidencyConfig, ResidencyMachine
from lora.tiers import LoadTier
from registry.ref import AdapterRef

_DEFAULTS = ResidencyConfig()


class AdapterManager(Generic[TablesT_co]):
    """Residency of all adapters of one engine; `entries` is in order of use, oldest first.

    The key of its object identifies an adapter, so equal files of two tenants are two adapters:
    what happens to one tenant's object does not affect the other.
    """

    def __init__(
        self,
        arena: Arena,
        loader: Loader[TablesT_co],
        config: ResidencyConfig = _DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.loader = loader
        self.clock = clock
        self.machine = ResidencyMachine(arena, loader, config, clock)
        self.counts = self.machine.counts
        self.entries = self.machine.entries
        self._max_prefetches = config.prefetch_per_tenant
        self._max_pinned_slabs = int(config.max_pinned_share * arena.num_slabs)
        self._pins: dict[str, Entry] = {}  # those that fit the limit are `is_pinned`

    # ---- wishes ----

    def prefetch(self, ref: AdapterRef, tenant_id: str) -> None:
        """Bring `ref` to the tier before the arena, without taking slabs or evicting others'.

        Nothing happens if the adapter is on its way, or if this tenant has enough under way.
        """
        if self.machine.prefetches[tenant_id] >= self._max_prefetches:
            return
        entry = self.machine.touch(ref, tenant_id)
        is_far = entry.state in ("remote", "disk") or entry.is_due(self.clock())
        if is_far and not entry.is_wanted:
            entry.prefetched_by = tenant_id
            self.machine.prefetches[tenant_id] += 1
            self.machine.note_wish(entry, "prefetched")

    def join(self, ref: AdapterRef, waiter: Waiter) -> LoadTier | None:
        """Register a request that needs `ref` until it leaves; starts or joins the load.

        Returns where the adapter has to come from, as far as is known yet; None if it is in the
        arena. A fetch from the store may find it on disk: then `fetched_from` says so.
        """
        entry = self.machine.touch(ref, waiter.tenant_id)
        entry.claim = Claim(waiter.tenant_id, waiter.weight)
        load_tier = entry.load_tier
        self.counts.asked(load_tier)
        entry.num_hits += load_tier is None
        entry.waiters[waiter.request_id] = waiter.priority, waiter.arrival
        self.machine.end_prefetch(entry)
        self.machine.note_wish(entry)
        return load_tier

    def leave(self, key: str, request_id: str) -> None:
        """Remove a request that has ended; a load that no request waits for is dropped."""
        entry = self.entries[key]
        del entry.waiters[request_id]
        self.machine.note_wish(entry)

    def pin(self, refs: Sequence[AdapterRef]) -> None:
        """Keep exactly these in the arena, in this order, as far as the limit for pins allows."""
        before, self._pins = self._pins, {}
        for ref in refs:
            entry = self._pins[ref.object_key] = self.machine.touch(ref, EVERYBODY)
            self._set_pinned(entry, True)
        for key in before.keys() - self._pins.keys():
            self._set_pinned(before[key], False)
        self._bring_in_pins()

    def wait(self, key: str) -> Failure | None:
        """Retry an adapter that failed long enough ago; returns its failure if it has failed."""
        entry = self.entries[key]
        if entry.state == "failed":
            self.machine.note_wish(entry)
        return entry.failure if entry.state == "failed" else None

    # ---- the way into the arena ----

    def retry_after_s(self, key: str) -> float:
        """Seconds after which a request for an adapter that failed may be repeated."""
        return self.entries[key].retry_after_s(self.clock())

    def is_ready(self, key: str) -> bool:
        return self.entries[key].state == "device"

    def fetched_from(self, key: str) -> LoadTier | None:
        """The tier where the fetch found an adapter that is on disk or further; else None."""
        entry = self.entries[key]
        if entry.state in ("remote", "fetching", "failed"):
            return None
        return "disk" if entry.was_on_disk else "store"

    def slabs_needed(self, key: str) -> int | None:
        """Slabs that have to be free for `place`; 0 if the adapter has its slabs already, and None
        if it cannot be placed yet, since it has not been read.
        """
        entry = self.entries[key]
        if entry.state in ("loading", "device"):
            return 0
        return entry.num_slabs if entry.state == "host" else None

    def place(self, key: str) -> int:
        """Take slabs, for which the caller made room, and start the copy into them.

        Returns the bytes to copy. Raises ArenaFull.
        """
        return self.machine.place(self.entries[key])

    def acquire(self, key: str) -> None:
        """Count one more request that holds the adapter in the arena until it is released."""
        entry = self.entries[key]
        entry.users += 1
        self.machine.note_idle(entry)

    def release(self, key: str) -> None:
        entry = self.entries[key]
        assert entry.users > 0, "released more often than acquired"
        entry.users -= 1
        self.machine.note_idle(entry)

    def tables(self, key: str) -> tuple[int, TablesT_co]:
        """Generation and tables of an adapter in the arena."""
        return self.machine.tables[key]

    def invocation_tokens(self, key: str) -> tuple[int, ...] | None:
        """Prompt tokens from which an activated LoRA applies; None for others, or before a read."""
        return self.entries[key].invocation_tokens

    # ---- once a step ----

    def poll(self) -> None:
        """Process the loader's reports since the last step, and give it more work."""
        for done in self.loader.poll():
            self.machine.take_in(done)
        self._bring_in_pins()
        self.machine.start_next()

    def _bring_in_pins(self) -> None:
        """Pin the adapters that fit the limit, in order, and bring them in."""
        left = self._max_pinned_slabs
        for entry in self._pins.values():
            self._set_pinned(entry, entry.num_slabs <= left)
            if not entry.is_pinned:
                continue
            left -= entry.num_slabs
            if entry.state == "failed":
                self.machine.note_wish(entry)
            elif entry.state == "host" and self.arena.make_room(entry.num_slabs):
                self.machine.place(entry)

    def _set_pinned(self, entry: Entry, is_pinned: bool) -> None:
        if entry.is_pinned != is_pinned:
            entry.is_pinned = is_pinned
            self.machine.meter.note(entry)
            self.machine.note_idle(entry)
            self.machine.note_wish(entry)

    @property
    def num_slabs_pinned(self) -> int:
        return sum(len(entry.slabs) for entry in self._pins.values() if entry.is_pinned)

    def check_integrity(self) -> None:
        self.machine.check_integrity()
        assert self.num_slabs_pinned <= self._max_pinned_slabs
