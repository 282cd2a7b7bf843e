"""Fair shares of what running requests hold: which of them give way to one that has to wait.

Within a priority class a waiting request takes the room of a tenant that has been served more and
holds most of what is short, as long as that tenant then holds at least as much as the waiting one,
by weight; half as much again if the waiting one holds some already. So every tenant that waits has
something at once, soon at least two thirds of what any other has, and turns make that equal as
answers end. The less served tenant is next in turn, so no two take turns at preempting each other.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.requests.request import Request

_SLACK = 1.5
"""How many times as much a tenant holds at least, after it gave way, as the one that waits and has
some already. With 1, two tenants with 64 seats preempted three answers for every ten that ended,
for nothing; with 1.5, none (bench/LOG.md).
"""
_Served = Callable[[Request], float]
"""Service that a request's tenant has had."""


@dataclass(slots=True)
class _Holding:
    """Running requests of one tenant, the oldest first, and their blocks."""

    weight: float
    requests: list[Request] = field(default_factory=list)
    num_blocks: int = 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.num_blocks += _num_blocks(request)

    def pop(self) -> Request:
        """Take the newest request out."""
        request = self.requests.pop()
        self.num_blocks -= _num_blocks(request)
        return request

    def share(self, *, of_seats: bool) -> float:
        return (len(self.requests) if of_seats else self.num_blocks) / self.weight

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of the adapters in use, by key."""
        return {r.adapter.object_key: r.adapter.rank for r in self.requests if r.adapter}


def giving_way(
    request: Request,
    running: Iterable[Request],
    served: _Served,
    *,
    needs_seat: bool,
    num_blocks: int,
    num_short: int,
) -> list[Request]:
    """The running requests to preempt for `request`, or none if not enough may be.

    needs_seat: whether no seat is free.
    num_blocks: blocks that the request will take, of which `num_short` have to be given to it.
    """
    own, others = _holdings(request, running, served)
    slack = _SLACK if own.requests else 1.0
    own.requests.append(request)
    own.num_blocks += num_blocks
    chosen: list[Request] = []
    while needs_seat or num_short > 0:
        by_seats = needs_seat
        most = max(others, key=lambda h: h.share(of_seats=by_seats), default=None)
        if most is None or not most.requests:
            return []
        victim = most.pop()
        if most.share(of_seats=by_seats) < slack * own.share(of_seats=by_seats):
            return []
        chosen.append(victim)
        needs_seat = False
        num_short -= _num_blocks(victim)
    return chosen


def ranks_giving_way(
    request: Request, running: Iterable[Request], served: _Served, *, num_short: int
) -> list[Request]:
    """The running requests whose adapters leave the step so that `request`'s finds room in it, or
    none if not enough may.   num_short: ranks that have to be given to it.
    """
    assert request.adapter is not None
    own, others = _holdings(request, running, served)
    slack = _SLACK if own.ranks else 1.0
    own_ranks = (sum(own.ranks.values()) + request.adapter.rank) / own.weight
    users = defaultdict[str, list[Request]](list)
    for other in running:
        if other.adapter:
            users[other.adapter.object_key].append(other)
    chosen: list[Request] = []
    while num_short > 0:
        most = max(others, key=lambda h: sum(h.ranks.values()) / h.weight, default=None)
        if most is None:
            return []
        # An adapter that others use as well stays where it is.
        alone = [key for key in most.ranks if all(r in most.requests for r in users[key])]
        if not alone:
            return []
        key, rank = alone[-1], most.ranks[alone[-1]]
        most.requests = [r for r in most.requests if r.adapter_key != key]
        if sum(most.ranks.values()) / most.weight < slack * own_ranks:
            return []
        chosen += users[key]
        num_short -= rank
    return chosen


def _holdings(
    request: Request, running: Iterable[Request], served: _Served
) -> tuple[_Holding, list[_Holding]]:
    """The holding of the request's tenant, and those of others that may have to give way to it."""
    own, others = _Holding(request.message.weight), dict[str, _Holding]()
    own_served = served(request)
    for other in sorted(running, key=lambda r: r.arrival):
        if other.priority != request.priority:
            continue
        if other.tenant_id == request.tenant_id:
            own.add(other)
        elif other.tenant_id in others:
            others[other.tenant_id].add(other)
        elif served(other) > own_served:
            others[other.tenant_id] = holding = _Holding(other.message.weight)
            holding.add(other)
    return own, list(others.values())


def _num_blocks(request: Request) -> int:
    return len(request.block_ids) - request.num_dead_blocks
