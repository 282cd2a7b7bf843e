"""Webhooks and events: a tenant's registered URL, and the signed events that are sent to it.

A webhook's secret is derived from the pepper and the webhook's id, so it is stored nowhere. Headers
and signature follow the Standard Webhooks specification.
"""

import base64
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from server.database.upsert import put, upsert
from server.text.json_object import JsonObject
from server.text.times import DAY_MS, rfc3339
from server.webhooks.tables import webhook_events, webhooks

EventType = Literal["webhook.test", "budget.threshold_reached", "budget.exhausted", "limit.reached"]

MAX_PENDING = 100
"""Most events of one tenant that wait for delivery. A request for another test event is refused;
for any other event, the one that waited longest is given up.
"""
KEPT_MS = 30 * DAY_MS
"""Age at which an event is deleted."""
MAX_PRUNED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A tenant's webhook.

    is_enabled: False after its receiver answered 410 (Gone).   num_failures: failed tries in a row.
    rests_until_ms: time before which nothing is sent.   tried_at_ms: end of the last try.
    """

    tenant_id: str
    webhook_id: str
    url: str
    is_enabled: bool
    created_at_ms: int
    num_failures: int
    rests_until_ms: int
    tried_at_ms: int

    @property
    def is_failing(self) -> bool:
        return self.num_failures > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event for one tenant.

    subject: what the event is about; a tenant has at most one event of a type and subject.
    body: JSON, byte for byte as signed.
    next_at_ms: time of the next try; None if the event was delivered or given up.
    """

    event_id: str
    tenant_id: str
    type: EventType
    subject: str
    body: str
    created_at_ms: int
    num_attempts: int = 0
    next_at_ms: int | None = None
    delivered_at_ms: int | None = None
    error: str | None = None


def new_event(
    tenant_id: str, type: EventType, data: JsonObject, *, now_ms: int, subject: str | None = None
) -> Event:
    """Make an event that is due now. subject: what the event is about, by default its own id."""
    event_id = f"evt_{secrets.token_hex(12)}"
    body = {"type": type, "timestamp": rfc3339(now_ms), "data": data}
    return Event(
        event_id=event_id,
        tenant_id=tenant_id,
        type=type,
        subject=subject or event_id,
        body=json.dumps(body, separators=(",", ":")),
        created_at_ms=now_ms,
        next_at_ms=now_ms,
    )


def insert_event(conn: Connection, event: Event) -> bool:
    """Insert an event. Returns False if the tenant has one of this type and subject already.

    The events that waited longest are given up if more than MAX_PENDING wait.
    """
    values = {name: getattr(event, name) for name in Event.__slots__}
    insert = upsert(conn.dialect.name, webhook_events).values(**values)
    is_new = conn.execute(insert.on_conflict_do_nothing()).rowcount == 1
    if is_new:
        columns = webhook_events.c
        kept = sa.select(columns.event_id).where(_waits(event.tenant_id))
        kept = kept.order_by(columns.created_at_ms.desc(), columns.event_id != event.event_id)
        is_old = columns.event_id.not_in(kept.limit(MAX_PENDING))
        _give_up(conn, _waits(event.tenant_id) & is_old, "too many events waited")
    return is_new


def list_events(
    conn: Connection, tenant_id: str, limit: int, before: tuple[int, str] | None = None
) -> list[Event]:
    """Return a tenant's events, newest first.   before: (created_at_ms, event_id) to go on from."""
    columns = webhook_events.c
    query = sa.select(webhook_events).where(columns.tenant_id == tenant_id)
    if before is not None:
        at_ms, event_id = before
        is_as_old = (columns.created_at_ms == at_ms) & (columns.event_id > event_id)
        query = query.where((columns.created_at_ms < at_ms) | is_as_old)
    query = query.order_by(columns.created_at_ms.desc(), columns.event_id).limit(limit)
    return [Event(**row._mapping) for row in conn.execute(query)]


def num_pending(conn: Connection, tenant_id: str) -> int:
    """Count a tenant's events that wait for delivery."""
    return conn.execute(sa.select(sa.func.count()).where(_waits(tenant_id))).scalar_one()


def prune_events(conn: Connection, now_ms: int) -> int:
    """Delete the oldest events that are older than KEPT_MS. Returns how many were deleted."""
    columns = webhook_events.c
    old = sa.select(columns.event_id).where(columns.created_at_ms < now_ms - KEPT_MS)
    old = old.order_by(columns.created_at_ms).limit(MAX_PRUNED_AT_ONCE)
    return conn.execute(sa.delete(webhook_events).where(columns.event_id.in_(old))).rowcount


def set_webhook(
    conn: Connection, tenant_id: str, url: str, *, now_ms: int, actor: str
) -> tuple[Webhook, bool]:
    """Set the URL of a tenant's only webhook, enable the webhook, and write an audit row.

    Returns (webhook, is_new); a new webhook has a new secret.
    """
    webhook_id = f"wh_{secrets.token_hex(12)}"
    values = {"url": url, "is_enabled": True, "num_failures": 0, "rests_until_ms": 0}
    # A new webhook waits for its turn like one that was just tried.
    new = {"webhook_id": webhook_id, "created_at_ms": now_ms, "tried_at_ms": now_ms}
    webhook = Webhook(**put(conn, webhooks, {"tenant_id": tenant_id, **new, **values}, *values))
    _audit(conn, "webhook.set", webhook, now_ms, actor)
    return webhook, webhook.webhook_id == webhook_id


def get_webhook(conn: Connection, tenant_id: str) -> Webhook | None:
    row = conn.execute(sa.select(webhooks).filter_by(tenant_id=tenant_id)).first()
    return Webhook(**row._mapping) if row else None


def remove_webhook(conn: Connection, tenant_id: str, *, now_ms: int, actor: str) -> bool:
    """Remove a tenant's webhook, give up its undelivered events, and write an audit row.

    Returns False if the tenant has no webhook.
    """
    found = get_webhook(conn, tenant_id)
    if found is None:
        return False
    conn.execute(sa.delete(webhooks).filter_by(tenant_id=tenant_id))
    _give_up(conn, _waits(tenant_id), "the webhook was removed")
    _audit(conn, "webhook.remove", found, now_ms, actor)
    return True


def secret_of(pepper: str, webhook_id: str) -> str:
    """Return the secret that signatures are checked with: `whsec_` and base64 of 32 bytes."""
    return "whsec_" + base64.b64encode(_key(pepper, webhook_id)).decode()


def signed_headers(pepper: str, webhook_id: str, event: Event, now_ms: int) -> dict[str, str]:
    """Return the headers of one try. All tries share the event's id; each has its own timestamp."""
    timestamp = now_ms // 1000
    signed = f"{event.event_id}.{timestamp}.{event.body}".encode()
    digest = hmac.new(_key(pepper, webhook_id), signed, "sha256").digest()
    return {
        "webhook-id": event.event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


def _waits(tenant_id: str) -> sa.ColumnElement[bool]:
    """Whether an event is one of the tenant's that wait for delivery."""
    return (webhook_events.c.tenant_id == tenant_id) & webhook_events.c.next_at_ms.is_not(None)


def _give_up(conn: Connection, is_meant: sa.ColumnElement[bool], error: str) -> None:
    conn.execute(sa.update(webhook_events).where(is_meant).values(next_at_ms=None, error=error))


def _key(pepper: str, webhook_id: str) -> bytes:
    return hmac.new(pepper.encode(), b"webhook" + webhook_id.encode(), "sha256").digest()


def _audit(conn: Connection, action: str, webhook: Webhook, now_ms: int, actor: str) -> None:
    # The host alone: many receivers accept calls from anybody who knows the whole URL.
    host, target = urlsplit(webhook.url).hostname or "", webhook.webhook_id
    record_audit(conn, webhook.tenant_id, action, host, target=target, at_ms=now_ms, actor=actor)
