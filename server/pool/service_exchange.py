"""The service that engines gave to tenants, passed on from each engine to the others."""

from collections import defaultdict
from collections.abc import Collection

from engine.wire.messages import TenantService
from server.pool.engine import PooledEngine

_MAX_TENANTS = 100_000


class ServiceExchange:
    """Gathers totals and passes them on. Totals only grow, so the latest ones suffice."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)

    def note(self, message: TenantService) -> None:
        totals = self._totals[message.engine_id, message.epoch]
        if len(totals) < _MAX_TENANTS:
            totals |= dict(message.totals)

    async def pass_on(self, engines: Collection[PooledEngine]) -> None:
        """Tell every engine the totals of the others that changed since the last time."""
        gathered, self._totals = self._totals, defaultdict(dict)
        if len(engines) < 2:
            return
        for (engine_id, epoch), totals in gathered.items():
            message = TenantService(engine_id=engine_id, epoch=epoch, totals=tuple(totals.items()))
            for engine in engines:
                if engine.engine_id != engine_id:
                    await engine.client.tell(message)
