"""Bounds of bodies on their way in: of what all hold together, and those of one tenant.

They hold bytes of memory, or places on a disk. A sender must keep to a rate, so that one who stalls
holds what others need for seconds only. When nothing is left, the slowest body of the tenant that
holds most ends for a tenant that holds less.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

# 16 MiB at this rate take 256 s, and 1 MiB 16 s.
LEAST_BYTES_PER_S = 64 << 10
# A sender may be behind by so much: lines stall, and small bodies may come from slow ones.
GRACE_S = 10.0


class Arrival:
    """A body on its way.

    held: of the inflow's limit.   late_at_s: when its sender will be late if nothing more comes;
    infinite when all has come.
    """

    def __init__(self, tenant_id: str, inflow: "Inflow") -> None:
        self.tenant_id = tenant_id
        self.held = 0
        self.late_at_s = inflow.clock() + GRACE_S
        self.has_given_way = False
        self._inflow = inflow
        self._credit_s = GRACE_S
        self._waiting: asyncio.Timeout | None = None

    def hold(self, amount: int) -> None:
        """Hold more. Raises the inflow's error if this or an earlier amount cannot be had."""
        self._inflow.hold(self, amount)

    async def next(self, pieces: AsyncIterator[bytes]) -> bytes:
        """The next piece of the body, empty at its end; only the time of its sender counts.

        Raises TimeoutError for a sender that is late, and the inflow's error if the body gave way.
        """
        if self.has_given_way:
            raise self._inflow.busy()
        began_s = self._inflow.clock()
        self.late_at_s = began_s + self._credit_s
        try:
            async with asyncio.timeout(self._credit_s) as self._waiting:
                piece = await anext(pieces, b"")
        except TimeoutError:
            if self.has_given_way:
                raise self._inflow.busy() from None
            raise
        finally:
            self._waiting = None
        now_s = self._inflow.clock()
        earned_s = len(piece) / LEAST_BYTES_PER_S
        self._credit_s = min(GRACE_S, self._credit_s - (now_s - began_s) + earned_s)
        self.late_at_s = now_s + self._credit_s if piece else inf
        return piece

    def give_way(self) -> None:
        """End the body for another one: whoever waits for its next piece gets an error instead."""
        self.has_given_way = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True, eq=False)
class Inflow:
    """All bodies on their way.

    limit: what all together may hold.   tenant_limit: what one tenant's may.   busy: makes the
    error for a body that cannot have what it needs.
    """

    limit: int
    tenant_limit: int
    busy: Callable[[], Exception]
    clock: Callable[[], float] = time.monotonic
    _total: int = 0
    _held: Counter[str] = field(default_factory=Counter)
    # What holds something, in the order in which it began to.
    _arrivals: dict[Arrival, None] = field(default_factory=dict)

    @contextmanager
    def arrival(self, tenant_id: str, amount: int = 0) -> Iterator[Arrival]:
        """A body that holds `amount` from its beginning. Raises as `Arrival.hold` does."""
        arrival = Arrival(tenant_id, self)
        self.hold(arrival, amount)
        try:
            yield arrival
        finally:
            self._release(arrival)

    def hold(self, arrival: Arrival, amount: int) -> None:
        tenant_id = arrival.tenant_id
        wanted = self._held[tenant_id] + amount
        if arrival.has_given_way or wanted > self.tenant_limit:
            raise self.busy()
        while self._total + amount > self.limit:
            slowest = self._slowest_of_largest(wanted)
            self._release(slowest)
            slowest.give_way()
        if amount:
            self._total += amount
            self._held[tenant_id] = wanted
            arrival.held += amount
            self._arrivals[arrival] = None

    def _slowest_of_largest(self, wanted: int) -> Arrival:
        """The body to end for a tenant that would hold `wanted`, which is less than the largest.

        Raises if no tenant holds more, or if all bodies of the largest have come already.
        """
        largest, held = self._held.most_common(1)[0] if self._held else ("", 0)
        mine = (each for each in self._arrivals if each.tenant_id == largest)
        slowest = min(mine, key=lambda each: each.late_at_s, default=None)
        if held <= wanted or slowest is None or slowest.late_at_s == inf:
            raise self.busy()
        return slowest

    def _release(self, arrival: Arrival) -> None:
        self._total -= arrival.held
        self._held[arrival.tenant_id] -= arrival.held
        if not self._held[arrival.tenant_id]:
            del self._held[arrival.tenant_id]
        arrival.held = 0
        self._arrivals.pop(arrival, None)
