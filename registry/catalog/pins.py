"""Pins: the version that `latest` means is kept in device memory, for a price.

A pin is a series of intervals, one for each version that `latest` came to mean. Intervals are
billed, so only the end of an interval is ever changed. Functions that change a pin must be called
under `lock_tenant`, with the adapter as it was read under that lock.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, func, insert, select, update

from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import Adapter, Version
from registry.catalog.audit import audit_adapter
from registry.catalog.events import record_event
from registry.catalog.names import adapter_not_found
from registry.errors import QuotaExceeded
from registry.ref import AdapterRef, BaseRef
from registry.tables import adapter_pins as pins
from registry.tables import adapter_versions as versions

MAX_PINNED_BYTES = 4 << 30
"""Bytes on the device that one tenant may pin."""
MAX_PINS_IN_FORCE = 1000
"""Pins of all tenants that an engine is told of, the oldest first."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One interval. size_bytes: bytes on the device.   unpinned_at_ms: None while it is open."""

    pin_id: str
    adapter_id: str
    version: int
    tenant_id: str
    size_bytes: int
    pinned_at_ms: int
    unpinned_at_ms: int | None
    pinned_by: str

    def __str__(self) -> str:
        return f"version {self.version}, {self.size_bytes} bytes"


def pin_adapter(conn: Connection, adapter: Adapter, *, actor: str, now_ms: int) -> Pin:
    """Keep the adapter's `latest` on the device from now on; repeating is harmless.

    Raises NotFound if `latest` means no version; QuotaExceeded.
    """
    found = find_pins(conn, adapter.tenant_id, [adapter.adapter_id])
    if found:
        return found[adapter.adapter_id]
    if adapter.latest is None:
        raise adapter_not_found(adapter.name)
    used_bytes = pinned_bytes(conn, adapter.tenant_id)
    if used_bytes + device_bytes(adapter.latest) > MAX_PINNED_BYTES:
        raise QuotaExceeded.of("pinned_bytes", MAX_PINNED_BYTES, "unpin an adapter first")
    pin = _open(conn, adapter.tenant_id, adapter.latest, actor, now_ms)
    audit_adapter(conn, "adapter.pinned", adapter, str(pin), actor, now_ms)
    return pin


def unpin_adapter(conn: Connection, adapter: Adapter, *, actor: str, now_ms: int) -> None:
    """Let the adapter leave the device from now on; repeating is harmless."""
    for pin in find_pins(conn, adapter.tenant_id, [adapter.adapter_id]).values():
        _close(conn, pin, now_ms)
        audit_adapter(conn, "adapter.unpinned", adapter, str(pin), actor, now_ms)


def follow_latest(conn: Connection, adapter: Adapter, number: int | None, now_ms: int) -> None:
    """Move the adapter's pin, if any, to version `number`, the new `latest`; None ends the pin.

    The tenant's limit is not checked, so that a pinned adapter stays pinned.
    """
    pin = find_pins(conn, adapter.tenant_id, [adapter.adapter_id]).get(adapter.adapter_id)
    if pin is None or pin.version == number:
        return
    _close(conn, pin, now_ms)
    if number is not None:
        latest = adapter_rows.find_version_row(conn, adapter.tenant_id, adapter.adapter_id, number)
        assert latest is not None, "an alias means a version that is there"
        _open(conn, adapter.tenant_id, latest, pin.pinned_by, now_ms)


def find_pins(conn: Connection, tenant_id: str, adapter_ids: Sequence[str]) -> dict[str, Pin]:
    """The open intervals of these adapters, by adapter_id."""
    query = select(pins).where(
        pins.c.tenant_id == tenant_id,
        pins.c.unpinned_at_ms.is_(None),
        pins.c.adapter_id.in_(adapter_ids),
    )
    return {row.adapter_id: Pin(**row._mapping) for row in conn.execute(query)}


def pinned_bytes(conn: Connection, tenant_id: str) -> int:
    """Bytes on the device of all adapters that the tenant has pinned now."""
    query = select(func.coalesce(func.sum(pins.c.size_bytes), 0)).where(
        pins.c.tenant_id == tenant_id, pins.c.unpinned_at_ms.is_(None)
    )
    return int(conn.execute(query).scalar_one())


def pins_in_force(conn: Connection, base_revision: str) -> list[tuple[BaseRef, AdapterRef]]:
    """Pinned versions of all tenants for base models of this revision, the oldest pin first."""
    query = (
        select(versions)
        .join(pins, adapter_rows.is_meant_by(pins) & (pins.c.tenant_id == versions.c.tenant_id))
        .where(
            pins.c.unpinned_at_ms.is_(None),
            versions.c.state == adapter_rows.READY,
            versions.c.base_revision == base_revision,
        )
        .order_by(pins.c.pinned_at_ms, pins.c.pin_id)
    )
    found = map(adapter_rows.to_version, conn.execute(query.limit(MAX_PINS_IN_FORCE)))
    return [(version.base, version.ref) for version in found]


def device_bytes(version: Version) -> int:
    """Bytes on the device as the engine's proof measured; the object's size without a proof."""
    canary = version.passport.get("canary") or {}
    return int(canary.get("device_bytes") or version.size_bytes)


def _open(conn: Connection, tenant_id: str, version: Version, actor: str, now_ms: int) -> Pin:
    pin = Pin(
        pin_id=f"pin_{secrets.token_hex(16)}",
        adapter_id=version.adapter_id,
        version=version.version,
        tenant_id=tenant_id,
        size_bytes=device_bytes(version),
        pinned_at_ms=now_ms,
        unpinned_at_ms=None,
        pinned_by=actor,
    )
    conn.execute(insert(pins).values(asdict(pin)))
    record_event(conn, "pinned", tenant_id, pin.adapter_id, pin.version, now_ms)
    return pin


def _close(conn: Connection, pin: Pin, now_ms: int) -> None:
    # The end is not before the beginning, even if the clock has gone back.
    end = max(now_ms, pin.pinned_at_ms)
    is_it = (pins.c.pin_id == pin.pin_id) & (pins.c.tenant_id == pin.tenant_id)
    conn.execute(update(pins).where(is_it).values(unpinned_at_ms=end))
    record_event(conn, "unpinned", pin.tenant_id, pin.adapter_id, pin.version, now_ms)
