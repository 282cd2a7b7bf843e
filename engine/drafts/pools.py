"""Tenants' own answers, kept to draft from: what an adapter said before, it may say again.

A pool belongs to one tenant and one adapter, by its digest, so that neither a draft nor the time of
an answer tells of another tenant's text. Only answers whose requests say so are kept. No tenant's
answers make those of another give way, unless these were not used for an hour.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.drafts.ngrams import NO_DRAFT, Draft, NgramIndex

_TENANT_SHARE = 1 / 16
_IDLE_S = 3600.0
_BYTES_PER_TOKEN = 400
"""Memory of an index for each token; 340 were measured for random ones, which repeat least."""
_POOL_BYTES = 4096
_LEAST_BYTES = 2 * _POOL_BYTES
"""A tenant's share that is smaller holds no answer."""
_MOST_TOKENS = 2048
"""Tokens that are kept of an answer. Adding them takes the engine's loop 4 ms."""

PoolKey = tuple[str, str | None]
"""Tenant, and digest of the adapter; None for the base model."""


@dataclass(slots=True)
class _Pool:
    """Answers of one tenant and adapter, in two halves: the older one is dropped as a whole."""

    older: NgramIndex = field(default_factory=NgramIndex)
    newer: NgramIndex = field(default_factory=NgramIndex)
    used_at: float = 0.0

    @property
    def size_bytes(self) -> int:
        num_tokens = len(self.older.token_ids) + len(self.newer.token_ids)
        return _POOL_BYTES + _BYTES_PER_TOKEN * num_tokens

    def add(self, token_ids: Sequence[int], most_bytes: int) -> None:
        """Add an answer. The older half makes room if the pool would exceed `most_bytes`."""
        more_bytes = _BYTES_PER_TOKEN * (1 + len(token_ids))
        half_bytes = (most_bytes - _POOL_BYTES) // 2
        if _BYTES_PER_TOKEN * len(self.newer.token_ids) + more_bytes > half_bytes:
            self.older, self.newer = self.newer, NgramIndex()
        if more_bytes <= half_bytes:
            self.newer.add_text(token_ids)


class DraftPools:
    """All pools of an engine.

    most_bytes: of all together, of which a tenant has a sixteenth at most, for the adapters that it
    used last. An answer that finds no room is not kept.   clock: seconds, monotonic.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._tenant_bytes = int(most_bytes * _TENANT_SHARE)
        self._clock = clock
        self._pools: OrderedDict[PoolKey, _Pool] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def size_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self._pools.values())

    def find(self, key: PoolKey, tail: Sequence[int], most: int) -> Draft:
        """Tokens that may follow a text, `most` at most.   tail: the text's last tokens."""
        self._forget_idle()
        pool = self._pools.get(key)
        if pool is None:
            return NO_DRAFT
        self._use(key, pool)
        newer, older = pool.newer.find(tail, most), pool.older.find(tail, most)
        return newer if newer.match >= older.match else older

    def add(self, key: PoolKey, token_ids: Sequence[int]) -> None:
        """Keep an answer if there is room.   token_ids: with the last ones of its prompt."""
        self._forget_idle()
        own = [k for k in self._pools if k[0] == key[0]]
        if not own and self._room_bytes < self._tenant_bytes or self._tenant_bytes < _LEAST_BYTES:
            return
        pool = self._pools.setdefault(key, _Pool())
        self._use(key, pool)
        pool.add(token_ids[:_MOST_TOKENS], self._tenant_bytes)
        self._fit_tenant(key[0])

    def forget(self, tenant_id: str, digest: str | None) -> None:
        """Forget a tenant's answers: those of an adapter, or all if `digest` is None."""
        for key in [k for k in self._pools if k[0] == tenant_id and digest in (None, k[1])]:
            del self._pools[key]

    @property
    def _room_bytes(self) -> int:
        """Bytes that are no tenant's share: each tenant with a pool may come to use all of its."""
        num_tenants = len({tenant_id for tenant_id, _ in self._pools})
        return self._most_bytes - num_tenants * self._tenant_bytes

    def _use(self, key: PoolKey, pool: _Pool) -> None:
        pool.used_at = self._clock()
        self._pools.move_to_end(key)

    def _forget_idle(self) -> None:
        long_ago = self._clock() - _IDLE_S
        while self._pools and next(iter(self._pools.values())).used_at < long_ago:
            self._pools.popitem(last=False)

    def _fit_tenant(self, tenant_id: str) -> None:
        """Forget the tenant's pools that were used longest ago until the others fit its share."""
        own = [(key, pool.size_bytes) for key, pool in self._pools.items() if key[0] == tenant_id]
        size_bytes = sum(size for _, size in own)
        for key, size in own:
            if size_bytes <= self._tenant_bytes:
                return
            size_bytes -= size
            del self._pools[key]
