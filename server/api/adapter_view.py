"""Adapters, their versions, aliases and pins, as their tenant sees them."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from registry import pins
from registry.adapter_rows import Adapter, Version
from registry.alias_rows import Move, Target
from registry.catalog import Catalog
from registry.pins import Pin
from server.billing.prices import Price, prices_for
from server.billing.rating import hourly_pin_nanousd, monthly_storage_nanousd
from server.database.clock import now_ms
from server.pool.engines import Engines
from server.text.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class AdapterView:
    """Renders adapters of the registry, with their place in the engines and today's prices."""

    catalog: Catalog
    engines: Engines

    def adapters(self, conn: Connection, found: list[Adapter]) -> list[JsonObject]:
        """Adapters of one tenant. `canaries` has only those aliases that have a canary."""
        if not found:
            return []
        tenant_id, ids = found[0].tenant_id, [adapter.adapter_id for adapter in found]
        prices = prices_for(conn, now_ms(), tenant_id=tenant_id, adapter_ids=ids)
        pinned = pins.find_pins(conn, tenant_id, ids)
        return [
            self._adapter(adapter, prices[adapter.adapter_id], pinned.get(adapter.adapter_id))
            for adapter in found
        ]

    def adapter(self, conn: Connection, adapter: Adapter) -> JsonObject:
        return self.adapters(conn, [adapter])[0]

    def version(self, version: Version, price: Price) -> JsonObject:
        """A version. `tier` says where its weights are in the engines now."""
        residency = self.engines.residency(version.object_key)
        return {
            "version": version.version,
            "object": "adapter.version",
            "digest": version.digest,
            "base_revision": version.base_revision,
            "rank": version.rank,
            "size_bytes": version.size_bytes,
            "state": version.state,
            "tier": residency.tier if residency else "remote",
            "is_servable": self.catalog.is_servable(version),
            "passport": passport_view(version.passport, version.size_bytes, price),
            "created_at": version.created_at_ms // 1000,
            "deleted_at": None if version.deleted_at_ms is None else version.deleted_at_ms // 1000,
        }

    def _adapter(self, adapter: Adapter, price: Price, pin: Pin | None) -> JsonObject:
        canaries = {alias: _canary(target) for alias, target in adapter.aliases.items()}
        return {
            "id": adapter.name,
            "object": "adapter",
            "adapter_id": adapter.adapter_id,
            "created_at": adapter.created_at_ms // 1000,
            "aliases": {alias: target.version for alias, target in adapter.aliases.items()},
            "canaries": {alias: canary for alias, canary in canaries.items() if canary},
            "pin": pin and pin_view(pin, price),
            "latest": adapter.latest and self.version(adapter.latest, price),
        }


def passport_view(passport: JsonObject, size_bytes: int, price: Price) -> JsonObject:
    """A passport, with what storing its object for 30 days costs at today's price."""
    return {**passport, "storage_nanousd_per_month": monthly_storage_nanousd(size_bytes, price)}


def pin_view(pin: Pin, price: Price) -> JsonObject:
    """A pin. since: of this version, in Unix seconds.   size_bytes: on the device."""
    return {
        "since": pin.pinned_at_ms // 1000,
        "version": pin.version,
        "size_bytes": pin.size_bytes,
        "price_nanousd_per_hour": hourly_pin_nanousd(pin.size_bytes, price),
    }


def move_view(move: Move) -> JsonObject:
    """A move of an alias. version: null where the alias was removed."""
    return {
        "id": move.move_id,
        "object": "alias.move",
        "version": move.target.version if move.target else None,
        "canary": _canary(move.target) if move.target else None,
        "moved_at": move.moved_at_ms // 1000,
        "moved_by": move.moved_by,
    }


def _canary(target: Target) -> Mapping[str, int] | None:
    canary = target.canary
    return {"version": canary.version, "percent": canary.percent} if canary else None
