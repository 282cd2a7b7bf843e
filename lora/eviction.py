"""Eviction order of the idle items in the arena: adapters and KV blocks that may be used again.

The order is GreedyDual-Size-Frequency (Cherkasova 1998). The item of least value per slab goes
first; the clock, which is the highest priority evicted so far, is added to the value of each new
item, so an item that stays idle gradually falls behind. A tenant above its weighted share of the
idle slabs loses its own items first, so no tenant can flush a neighbour's. Spare slabs, whose
sources only use them as long as nobody else needs room, go before all items.
"""

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

Key = int | str
"""A KV block's slab, or an adapter's object key."""

EVERYBODY = ""
"""Tenant id of idle items that count in no tenant's share."""

_MOST_HITS = 8
"""Limit to the hits that count, so that an item that was popular once does not stay forever."""
_FIRST_CHANCE = 0.5
_CHANCE_WEIGHT = 1 / 128
_MOST_STALE = 64


class Source(Protocol):
    """An owner of idle items in the arena."""

    def evict(self, key: Key) -> None:
        """Retire the item's slabs."""
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """The tenant that an item is kept for.

    tenant_id: a tenant, or EVERYBODY.   weight: the tenant's weight in the shares.
    adapter: the item is useless unless this adapter is in the arena; None if it needs none.
    """

    tenant_id: str
    weight: float = 1.0
    adapter: str | None = None


@dataclass(slots=True)
class _Item:
    """One idle item.

    priority: clock + value when it became idle.   number: orders equal priorities, oldest first.
    """

    source: Source
    claim: Claim
    num_slabs: int
    was_used: bool
    priority: float
    number: int


@dataclass(slots=True)
class _Share:
    """One tenant's idle slabs. heap: (priority, number, key); some entries are outdated."""

    tenant_id: str
    weight: float = 0.0
    num_slabs: int = 0
    num_items: int = 0
    heap: list[tuple[float, int, Key]] = field(default_factory=list)


class EvictionOrder:
    """The idle items of the arena, by tenant and by priority."""

    def __init__(self) -> None:
        self._num_slabs = 0
        self._spare: dict[Key, Source] = {}  # oldest first
        self._clock = 0.0
        self._numbers = count()
        self._items: dict[Key, _Item] = {}
        self._shares: dict[str, _Share] = {}
        self._tenants_slabs = 0
        self._tenants_weight = 0.0
        self._by_adapter: defaultdict[str, set[Key]] = defaultdict(set)
        # By source, the learned chance that an item without hits is used again.
        self._chances: dict[Source, float] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._items or key in self._spare

    @property
    def num_slabs(self) -> int:
        """Slabs of idle items, and spare ones."""
        return self._num_slabs + len(self._spare)

    @property
    def num_spare(self) -> int:
        return len(self._spare)

    def add(
        self,
        source: Source,
        key: Key,
        claim: Claim,
        *,
        num_slabs: int,
        num_hits: int,
        reload_s: float,
    ) -> None:
        """Add an item that is idle from now on.

        num_hits: requests that found it in the arena.   reload_s: time to bring it back.
        """
        assert key not in self._items, "idle twice"
        chance = self._chances.get(source, _FIRST_CHANCE)
        value = (min(num_hits, _MOST_HITS) + chance) * reload_s / num_slabs
        item = _Item(
            source, claim, num_slabs, num_hits > 0, self._clock + value, next(self._numbers)
        )
        self._items[key] = item
        share = self._grow(claim, num_slabs)
        if claim.adapter is not None:
            self._by_adapter[claim.adapter].add(key)
        self._push(share, item, key)

    def add_spare(self, source: Source, key: Key) -> None:
        """Add one slab that its source uses until it is evicted or taken."""
        assert key not in self, "idle twice"
        self._spare[key] = source

    def take_spare(self, key: Key) -> None:
        """Remove a slab that its source gives back."""
        del self._spare[key]

    def take(self, key: Key) -> None:
        """Remove an item that is used again."""
        self._remove(key, came_back=1.0)

    def adapter_left(self, adapter: str) -> None:
        """Move items that need this adapter to the front; they are usable again if it returns."""
        for key in self._by_adapter.get(adapter, ()):
            item = self._items[key]
            item.priority = 0.0
            self._push(self._shares[item.claim.tenant_id], item, key)

    def evict(self, num_slabs: int, *, spares: bool = True) -> None:
        """Evict until this many slabs are given back: spare ones, the newest first, then items.

        At least as many must be idle.   spares: no spare ones are evicted if it is false.
        """
        num_spare = min(num_slabs, len(self._spare)) if spares else 0
        for _ in range(num_spare):
            key, source = self._spare.popitem()
            source.evict(key)
        target = self._num_slabs - (num_slabs - num_spare)
        assert target >= 0
        while self._num_slabs > target:
            victims = self._above_share()
            heads = [(self._head(share), share) for share in victims or self._shares.values()]
            heapq.heapify(heads)
            if not victims:
                self._evict(heads[0][0][2])
            while victims and heads and self._num_slabs > target:
                head, share = heapq.heappop(heads)
                if self._is_above_share(share):
                    self._evict(head[2])
                    if share.num_items:
                        heapq.heappush(heads, (self._head(share), share))

    def num_slabs_of(self, tenant_id: str) -> int:
        share = self._shares.get(tenant_id)
        return share.num_slabs if share else 0

    def check_integrity(self) -> None:
        slabs, items = Counter[str](), Counter[str]()
        for item in self._items.values():
            slabs[item.claim.tenant_id] += item.num_slabs
            items[item.claim.tenant_id] += 1
        assert {t: (s.num_slabs, s.num_items) for t, s in self._shares.items()} == {
            tenant_id: (slabs[tenant_id], items[tenant_id]) for tenant_id in items
        }
        assert self._num_slabs == slabs.total()
        assert not self._spare.keys() & self._items.keys()
        assert self._tenants_slabs == slabs.total() - slabs[EVERYBODY]
        weights = (s.weight for t, s in self._shares.items() if t != EVERYBODY)
        assert math.isclose(self._tenants_weight, sum(weights), abs_tol=1e-6)
        needing = {k: i.claim.adapter for k, i in self._items.items() if i.claim.adapter}
        assert {k: a for a, keys in self._by_adapter.items() for k in keys} == needing

    # ---- shares ----

    def _above_share(self) -> list[_Share]:
        """Shares that lose items first: those of tenants above their share, and EVERYBODY's.

        The list is empty if no tenant is above its share.
        """
        above = [share for share in self._shares.values() if self._is_above_share(share)]
        return above if any(share.tenant_id != EVERYBODY for share in above) else []

    def _is_above_share(self, share: _Share) -> bool:
        if share.tenant_id == EVERYBODY:
            return True
        fair = self._tenants_slabs * share.weight / self._tenants_weight
        return share.num_slabs > fair * (1 + 1e-9)

    def _grow(self, claim: Claim, num_slabs: int) -> _Share:
        """Count one more item of this size in its tenant's share."""
        share = self._shares.get(claim.tenant_id)
        if share is None:
            share = self._shares[claim.tenant_id] = _Share(claim.tenant_id)
        if claim.tenant_id != EVERYBODY:
            self._tenants_slabs += num_slabs
            self._tenants_weight += claim.weight - share.weight
        share.weight = claim.weight
        share.num_slabs += num_slabs
        share.num_items += 1
        self._num_slabs += num_slabs
        return share

    # ---- items ----

    def _evict(self, key: Key) -> None:
        item = self._remove(key, came_back=0.0)
        self._clock = max(self._clock, item.priority)
        item.source.evict(key)

    def _remove(self, key: Key, came_back: float) -> _Item:
        """Remove an item; if no request had found it, learn from it whether such ones come back."""
        item = self._items.pop(key)
        share, num_slabs = self._shares[item.claim.tenant_id], item.num_slabs
        share.num_slabs -= num_slabs
        share.num_items -= 1
        self._num_slabs -= num_slabs
        if not share.num_items:
            del self._shares[share.tenant_id]
        if share.tenant_id != EVERYBODY:
            self._tenants_slabs -= num_slabs
            if not share.num_items:
                self._tenants_weight -= share.weight
        if (adapter := item.claim.adapter) is not None:
            self._by_adapter[adapter].discard(key)
            if not self._by_adapter[adapter]:
                del self._by_adapter[adapter]
        if not item.was_used:
            chance = self._chances.get(item.source, _FIRST_CHANCE)
            self._chances[item.source] = chance + (came_back - chance) * _CHANCE_WEIGHT
        return item

    def _push(self, share: _Share, item: _Item, key: Key) -> None:
        heapq.heappush(share.heap, (item.priority, item.number, key))
        if len(share.heap) > 2 * share.num_items + _MOST_STALE:
            share.heap = [entry for entry in share.heap if self._is_true(entry)]
            heapq.heapify(share.heap)

    def _head(self, share: _Share) -> tuple[float, int, Key]:
        """Heap entry of the tenant's item that is evicted first."""
        while not self._is_true(share.heap[0]):
            heapq.heappop(share.heap)
        return share.heap[0]

    def _is_true(self, entry: tuple[float, int, Key]) -> bool:
        priority, number, key = entry
        item = self._items.get(key)
        return item is not None and (item.priority, item.number) == (priority, number)
