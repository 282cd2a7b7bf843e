"""Policies: the order in which waiting requests are admitted, and who is charged for service.

fcfs   first come, first served
sjf    shortest expected first, by the tenant's answers so far; no request waits for ever
vtc    least served tenant first: virtual token counters (arXiv 2401.00588)

Priority classes take precedence in all of them: interactive requests, then batch.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from engine.config import SchedulingPolicy
from engine.requests.request import Request
from engine.scheduling.shared_service import GivenService, HeardService, Totals
from engine.wire.messages import Priority, TenantService

PREFILL_COST = 1.0
DECODE_COST = 2.0
"""Service of a token computed from the prompt, and of one generated, as in arXiv 2401.00588."""
_MAX_TENANTS = 100_000
_PATIENCE_S = 5.0
"""How long a tenant may be served nothing here because other engines served it."""
_SJF_PATIENCE_S = 10.0
_SJF_MEMORY = 0.9


class Policy:
    """First come, first served, within each priority class; the other policies change that."""

    has_shares = False
    """Whether tenants have equal shares of seats and KV, weights apart."""

    def order(self, ready: Sequence[Request]) -> Iterator[Request]:
        """Yield `ready` (oldest first) in the order to admit them; charges made meanwhile count."""
        return iter(sorted(ready, key=lambda r: r.priority))

    def charge(self, request: Request, service: float) -> None:
        """Charge the request's tenant for service, in prefill tokens; less than 0 is a refund of
        what was charged in the same step.
        """

    def served(self, request: Request) -> float:
        """Service that the request's tenant has had; those of the most served are preempted first.

        The service is 0 in a policy that does not count it.
        """
        return 0.0

    def ended(self, request: Request) -> None:
        """Note that a request has ended, and how long its answer is."""

    def take_service(self) -> Totals:
        """Take the totals that changed since the last call, for the other engines."""
        return ()

    def note_elsewhere(self, message: TenantService) -> None:
        """Note the service that another engine gave."""


def make_policy(name: SchedulingPolicy, clock: Callable[[], float]) -> Policy:
    if name == "vtc":
        return VirtualTokenCounters(clock)
    return ShortestFirst(clock) if name == "sjf" else Policy()


class ShortestFirst(Policy):
    """Fewest expected tokens first; requests that waited long go before, oldest first.

    The expected length of an answer is the running mean of its tenant's answers with that adapter,
    and `max_tokens` if that is less or there is no answer yet.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._means: OrderedDict[tuple[str, str | None], float] = OrderedDict()

    def order(self, ready: Sequence[Request]) -> Iterator[Request]:
        overdue = self._clock() - _SJF_PATIENCE_S

        def key(request: Request) -> tuple[Priority, float]:
            is_overdue = request.group.arrived_at <= overdue
            return request.priority, 0.0 if is_overdue else self.expected_tokens(request)

        return iter(sorted(ready, key=key))

    def expected_tokens(self, request: Request) -> float:
        """Expected number of tokens that are still to be computed, prompt included."""
        mean = self._means.get((request.tenant_id, request.adapter_key))
        longest = float(request.params.max_tokens)
        expected = longest if mean is None else min(mean, longest)
        return request.num_tokens_to_do + max(expected - len(request.output_token_ids), 0.0)

    def ended(self, request: Request) -> None:
        key = (request.tenant_id, request.adapter_key)
        count = float(len(request.output_token_ids))
        mean = self._means.pop(key, count)
        self._means[key] = _SJF_MEMORY * mean + (1 - _SJF_MEMORY) * count
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)


class VirtualTokenCounters(Policy):
    """Counts each tenant's service, divided by its weight; the least served backlogged one is next.

    A tenant is backlogged if it has a request that waits and could run. One that becomes backlogged
    is lifted to the least counter of those that are, so that no tenant saves up service by staying
    away. While two tenants are backlogged, their weighted service differs by at most twice what the
    running batch can hold (theorem 4.4 of the paper).

    With many engines, service that a tenant got elsewhere while any tenant is backlogged here is
    added to its counter as if it had been given here, and a tenant that is served elsewhere is
    lifted as if it were backlogged. So two tenants that are backlogged at all engines differ, over
    all, by at most the sum of the engines' bounds and what they serve between two exchanges; and a
    tenant that is backlogged at a few engines gets what it can there before the others get more
    (max-min). While no request waits here, service elsewhere keeps nobody waiting, and is not
    added. It only changes whose turn it is: a seat is never left empty. A tenant that waits here
    and is served nothing for 5 s is forgiven what it got elsewhere, until it is served. So no
    tenant waits longer than that for a turn because of service elsewhere, and service by an
    engine that is gone is not held against it for ever.
    """

    has_shares = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counters: OrderedDict[str, float] = OrderedDict()
        self._clock = clock
        self._backlogged: set[str] = set()
        self._last_backlogged: str | None = None
        self._level = 0.0  # the least counter of a backlogged tenant
        self._given = GivenService()
        self._heard = HeardService()
        self._elsewhere: dict[str, float] = {}  # part of a counter that other engines gave
        self._now = clock()
        self._unserved_since: dict[str, float] = {}  # of backlogged tenants

    def order(self, ready: Sequence[Request]) -> Iterator[Request]:
        self._now = self._clock()
        self._lift({request.tenant_id for request in ready})
        self._forgive()
        by_class: dict[Priority, dict[str, deque[Request]]] = defaultdict(dict)
        for request in ready:
            tenants, tenant_id = by_class[request.priority], request.tenant_id
            if tenant_id not in tenants:
                tenants[tenant_id] = deque()
            tenants[tenant_id].append(request)
        return self._interleave([tenants for _, tenants in sorted(by_class.items())])

    def charge(self, request: Request, service: float) -> None:
        if not service:
            return
        tenant_id, weighted = request.tenant_id, service / request.message.weight
        self.counters[tenant_id] = self.counters.get(tenant_id, 0.0) + weighted
        self._given.add(tenant_id, weighted)
        if service > 0 and tenant_id in self._unserved_since:
            self._unserved_since[tenant_id] = self._now

    def served(self, request: Request) -> float:
        return self.counters.get(request.tenant_id, 0.0)

    def take_service(self) -> Totals:
        return self._given.take()

    def note_elsewhere(self, message: TenantService) -> None:
        news = self._heard.take_in(message)
        if not self._backlogged:
            return  # it keeps nobody waiting
        for tenant_id, service in news:
            counter = self.counters.get(tenant_id, 0.0)
            if counter <= self._level:
                self._elsewhere.pop(tenant_id, None)
            self.counters[tenant_id] = max(counter, self._level) + service
            self._elsewhere[tenant_id] = self._elsewhere.get(tenant_id, 0.0) + service

    def _interleave(self, classes: list[dict[str, deque[Request]]]) -> Iterator[Request]:
        """Yield the least served tenant's oldest request, by the counters at each moment."""
        for tenants in classes:
            while tenants:
                tenant_id = min(tenants, key=self.counters.__getitem__)
                yield tenants[tenant_id].popleft()
                if not tenants[tenant_id]:
                    del tenants[tenant_id]

    def _lift(self, backlogged: set[str]) -> None:
        stayed = self._backlogged & backlogged
        if left := self._backlogged - backlogged:
            self._last_backlogged = max(left, key=self.counters.__getitem__)
        level = 0.0
        if stayed:
            level = min(self.counters[tenant_id] for tenant_id in stayed)
        elif self._last_backlogged is not None:
            level = self.counters.get(self._last_backlogged, 0.0)
        for tenant_id in backlogged - stayed:
            self.counters[tenant_id] = max(self.counters.pop(tenant_id, 0.0), level)
        self._backlogged = backlogged
        self._forget()

    def _forgive(self) -> None:
        """Deduct service elsewhere from tenants that only it has kept waiting, and for too long."""
        since = self._unserved_since
        self._unserved_since = {t: since.get(t, self._now) for t in self._backlogged}
        if not self._backlogged:
            return
        least = min(self._backlogged, key=self.counters.__getitem__)
        self._level = self.counters[least]
        self._elsewhere.pop(least, None)
        for tenant_id, unserved_since in self._unserved_since.items():
            is_overdue = self._now - unserved_since >= _PATIENCE_S
            if is_overdue and (service := self._elsewhere.pop(tenant_id, 0.0)):
                self.counters[tenant_id] = max(self.counters[tenant_id] - service, self._level)

    def _forget(self) -> None:
        """Drop counters beyond _MAX_TENANTS: of idle tenants, those that came back longest ago."""
        while len(self.counters) > _MAX_TENANTS:
            oldest = next(iter(self.counters))
            if oldest in self._backlogged:
                self.counters.move_to_end(oldest)
            else:
                del self.counters[oldest]
                self._elsewhere.pop(oldest, None)
