"""What engines tell each other of the service they gave, so that a tenant has one share of all.

An engine tells totals since its start (`engine.messages.TenantService`), not what was added: so a
message may be lost, repeated, late, or passed on by several gateways, and the next one says it all.
"""

from collections import OrderedDict
from itertools import islice

from engine.messages import TenantService

_MAX_TOLD = 1_000
"""Totals of one message, about 40 kB; the others are in the next."""
_MAX_TOTALS = 100_000
"""Tenants whose totals are kept. One that was forgotten begins at 0 again, and counts elsewhere
once it exceeds what was heard of it there.
"""
_MAX_HEARD = 200_000
"""Totals of others that are remembered, about 70 MB; those of engines that are gone fall out."""

Totals = tuple[tuple[str, float], ...]


class GivenService:
    """Of this engine, since its start: by tenant, in prefill tokens divided by its weight."""

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
        """Totals that have grown since they were last taken, those that did so first."""
        told = list(islice(self._untold, _MAX_TOLD))
        for tenant_id in told:
            del self._untold[tenant_id]
        return tuple((tenant_id, self._totals[tenant_id]) for tenant_id in told)


class HeardService:
    """The newest totals of the other engines."""

    def __init__(self) -> None:
        self._totals: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def take_in(self, message: TenantService) -> list[tuple[str, float]]:
        """(tenant, service) that is new in it.

        The first total that is heard of an engine and a tenant is where counting begins: it may be
        years of service from before we started. An engine that started again begins at 0.
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
