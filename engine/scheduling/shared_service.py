"""Service that engines report to each other, so that a tenant has one share of all of them.

An engine reports totals since its start (`engine.wire.messages.TenantService`), not increments. So
a message may be lost, repeated, late, or passed on by several gateways: the next one makes up for
it.
"""

from collections import OrderedDict
from itertools import islice

from engine.wire.messages import TenantService

_MAX_TOLD = 1_000
"""Most totals in one message, about 40 kB; further totals are in the next one."""
_MAX_TOTALS = 100_000
"""Most tenants whose totals are kept. A tenant that was forgotten begins at 0 again; other engines
count its service again once its total exceeds the one that they heard last.
"""
_MAX_HEARD = 200_000
"""Most totals of other engines that are kept, about 70 MB; those of lost engines drop out."""

Totals = tuple[tuple[str, float], ...]


class GivenService:
    """Service of this engine since its start, by tenant: prefill tokens divided by its weight."""

    def __init__(self) -> None:
        self._totals: OrderedDict[str, float] = OrderedDict()  # served longest ago first
        self._untold: dict[str, None] = {}

    def add(self, tenant_id: str, service: float) -> None:
        self._totals[tenant_id] = self._totals.pop(tenant_id, 0.0) + service
        self._untold[tenant_id] = None
        if len(self._totals) > _MAX_TOTALS:
            forgotten, _ = self._totals.popitem(last=False)
            self._untold.pop(forgotten, None)

    def take(self) -> Totals:
        """Take up to _MAX_TOLD totals that grew since they were last taken, in order of growth."""
        told = list(islice(self._untold, _MAX_TOLD))
        for tenant_id in told:
            del self._untold[tenant_id]
        return tuple((tenant_id, self._totals[tenant_id]) for tenant_id in told)


class HeardService:
    """The newest totals of the other engines."""

    def __init__(self) -> None:
        self._totals: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def take_in(self, message: TenantService) -> list[tuple[str, float]]:
        """Take a message; return (tenant id, service) for the service that is new in it.

        Counting begins at the first total that is heard of an engine and a tenant, which may be
        years of service from before this engine started. An engine that restarted begins at 0.
        """
        news = []
        for tenant_id, total in message.totals:
            key = message.engine_id, tenant_id
            epoch, known = self._totals.pop(key, (message.epoch, total))
            if epoch < message.epoch:
                epoch, known = message.epoch, 0.0
            if epoch == message.epoch and total > known:
                news.append((tenant_id, total - known))
                known = total
            self._totals[key] = epoch, known
        while len(self._totals) > _MAX_HEARD:
            self._totals.popitem(last=False)
        return news
