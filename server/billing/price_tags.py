"""What the base model costs a tenant now, without a question to the database for every request.

A price that begins or ends is seen to the millisecond; one that was just made, or a tenant that was
put on another plan, at once here and within two seconds at the other gateways.
"""

from collections.abc import Callable

from server.billing.prices import Price, price_with_end
from server.database import clock
from server.database.database import Database
from server.database.expiring_cache import ExpiringCache


class PriceTags:
    """Prices by tenant. now_ms: in Unix milliseconds."""

    def __init__(self, database: Database, *, now_ms: Callable[[], int] = clock.now_ms) -> None:
        self._database = database
        self._now_ms = now_ms
        self._prices: ExpiringCache[tuple[Price, int]] = ExpiringCache()

    async def of(self, tenant_id: str) -> Price:
        """Raises LedgerUnavailable."""
        price, ends_at_ms = await self._prices.get(tenant_id, lambda: self._read(tenant_id))
        if ends_at_ms <= self._now_ms():
            price, _ = await self._read(tenant_id)
        return price

    def forget(self) -> None:
        """After a new price, and after a tenant's change of plan."""
        self._prices.forget()

    async def _read(self, tenant_id: str) -> tuple[Price, int]:
        return await self._database.read(
            lambda conn: price_with_end(conn, self._now_ms(), tenant_id=tenant_id)
        )
