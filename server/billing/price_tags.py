"""A cache of the current prices of base models for each tenant, so that requests need no query.

A price that begins or ends takes effect to the millisecond. A new price or a change of a tenant's
plan takes effect at once in this gateway and within two seconds in the others.
"""

from collections.abc import Callable

from server.billing.prices import Price, price_with_end
from server.database import clock
from server.database.database import Database
from server.database.expiring_cache import ExpiringCache


class PriceTags:
    """Cached prices by tenant and base model. now_ms: returns Unix milliseconds."""

    def __init__(self, database: Database, *, now_ms: Callable[[], int] = clock.now_ms) -> None:
        self._database = database
        self._now_ms = now_ms
        self._prices: ExpiringCache[tuple[Price, int]] = ExpiringCache()

    async def of(self, tenant_id: str, base_model: str) -> Price:
        """Return the tenant's current price of a base model. Raises LedgerUnavailable."""
        key = f"{tenant_id}/{base_model}"
        price, ends_at_ms = await self._prices.get(key, lambda: self._read(tenant_id, base_model))
        if ends_at_ms <= self._now_ms():
            price, _ = await self._read(tenant_id, base_model)
        return price

    def forget(self) -> None:
        """Empty the cache; call it after a new price and after a change of a tenant's plan."""
        self._prices.forget()

    async def _read(self, tenant_id: str, base_model: str) -> tuple[Price, int]:
        asked = {"tenant_id": tenant_id, "base_model": base_model}
        return await self._database.read(lambda conn: price_with_end(conn, self._now_ms(), **asked))
