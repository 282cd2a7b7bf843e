"""A tenant's webhook: its admin or the operator sets it, tests it and lists its events."""

from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.errors import Limited, NotFound
from server.accounts import tenants
from server.api.answer import Answer
from server.api.bodies import BodyFields, json_body
from server.api.deps import (
    DatabaseDep,
    PepperDep,
    TenantAdminKey,
    WebhookRulesDep,
    operators_router,
    tenants_router,
)
from server.api.endpoints.lists import ListAnswer
from server.database.clock import now_ms
from server.database.database import Database
from server.text.times import unix_seconds
from server.webhooks import events
from server.webhooks.events import MAX_PENDING, Event, EventType, Webhook
from server.webhooks.urls import MAX_URL_CHARACTERS, UrlRules, check_url

router = tenants_router()
admin_router = operators_router()

MAX_EVENTS = 100


class _NewWebhook(BodyFields):
    """A webhook. url: the address that events are sent to, by POST."""

    url: str = Field(max_length=MAX_URL_CHARACTERS)


Body = Annotated[_NewWebhook, json_body(_NewWebhook)]


class WebhookAnswer(Answer):
    """A webhook.

    is_enabled: false after its receiver answered 410.   created_at: in Unix seconds.
    """

    object: Literal["webhook"] = "webhook"
    webhook_id: str = Field(examples=["wh_6d0f3b1a95c2e784f1b0c3d2"])
    url: str = Field(examples=["https://example.com/chorale"])
    is_enabled: bool
    created_at: int = Field(examples=[1_798_761_600])


class WebhookMade(WebhookAnswer):
    """A new webhook.   secret: the key of its events' signatures, which no other answer carries."""

    secret: str = Field(examples=["whsec_UNhY4JhezH9gQYqvDMWrWH9CwlcKiECVqejMrND2VFw="])


class WebhookDeleted(Answer):
    """The answer to the removal of a webhook."""

    object: Literal["webhook.deleted"] = "webhook.deleted"
    deleted: Literal[True] = True


class WebhookEvent(Answer):
    """An event. body: as it was sent, for a receiver that missed it.

    next_attempt_at: null after the last attempt.   error: of the last attempt.
    created_at, next_attempt_at, delivered_at: in Unix seconds.
    """

    object: Literal["webhook.event"] = "webhook.event"
    event_id: str = Field(examples=["evt_a1c9e5d37f20b8645e1d0c7b"])
    type: EventType = Field(examples=["webhook.test"])
    body: str = Field(
        examples=['{"type":"webhook.test","timestamp":"2027-01-01T00:00:00Z","data":{}}']
    )
    created_at: int = Field(examples=[1_798_761_600])
    num_attempts: int = Field(examples=[1])
    next_attempt_at: int | None = Field(examples=[None])
    delivered_at: int | None = Field(examples=[1_798_761_602])
    error: str | None = Field(examples=[None])


class WebhookEventList(ListAnswer[WebhookEvent]):
    """The latest events of a tenant, newest first."""


@router.put("/webhook")
async def set_webhook(
    database: DatabaseDep,
    pepper: PepperDep,
    webhook_rules: WebhookRulesDep,
    identity: TenantAdminKey,
    body: Body,
) -> WebhookAnswer | WebhookMade:
    """Set the URL of the tenant's webhook.

    The first answer carries the secret, which stays the same when the URL changes.
    """
    return await _set(database, pepper, webhook_rules, identity.tenant_id, body.url, identity.actor)


@router.get("/webhook")
async def get_webhook(database: DatabaseDep, identity: TenantAdminKey) -> WebhookAnswer:
    """Get the tenant's webhook."""
    return await _get(database, identity.tenant_id)


@router.delete("/webhook")
async def remove_webhook(database: DatabaseDep, identity: TenantAdminKey) -> WebhookDeleted:
    """Remove the tenant's webhook."""
    return await _remove(database, identity.tenant_id, identity.actor)


@router.post("/webhook/test", status_code=202)
async def send_test(database: DatabaseDep, identity: TenantAdminKey) -> WebhookEvent:
    """Send a test event to the tenant's webhook; it is delivered within seconds."""
    return await _test(database, identity.tenant_id)


@router.get("/webhook/events")
async def list_events(database: DatabaseDep, identity: TenantAdminKey) -> WebhookEventList:
    """List the tenant's webhook events, newest first, with the state of their delivery."""
    return await _events(database, identity.tenant_id)


@admin_router.put("/tenants/{tenant}/webhook")
async def set_webhook_of(
    tenant: str,
    body: Body,
    database: DatabaseDep,
    pepper: PepperDep,
    webhook_rules: WebhookRulesDep,
) -> WebhookAnswer | WebhookMade:
    """Set the URL of a tenant's webhook.

    The first answer carries the secret, which stays the same when the URL changes.
    """
    return await _set(database, pepper, webhook_rules, tenant, body.url, "operator")


@admin_router.get("/tenants/{tenant}/webhook")
async def get_webhook_of(tenant: str, database: DatabaseDep) -> WebhookAnswer:
    """Get a tenant's webhook."""
    return await _get(database, tenant)


@admin_router.delete("/tenants/{tenant}/webhook")
async def remove_webhook_of(tenant: str, database: DatabaseDep) -> WebhookDeleted:
    """Remove a tenant's webhook."""
    return await _remove(database, tenant, "operator")


@admin_router.post("/tenants/{tenant}/webhook/test", status_code=202)
async def send_test_of(tenant: str, database: DatabaseDep) -> WebhookEvent:
    """Send a test event to a tenant's webhook; it is delivered within seconds."""
    return await _test(database, tenant)


@admin_router.get("/tenants/{tenant}/webhook/events")
async def list_events_of(tenant: str, database: DatabaseDep) -> WebhookEventList:
    """List a tenant's webhook events, newest first, with the state of their delivery."""
    return await _events(database, tenant)


async def _set(
    database: Database, pepper: str, webhook_rules: UrlRules, tenant: str, url: str, actor: str
) -> WebhookAnswer | WebhookMade:
    check_url(url, webhook_rules)

    def write(conn: Connection) -> tuple[Webhook, bool]:
        tenant_id = tenants.get_tenant(conn, tenant).tenant_id
        return events.set_webhook(conn, tenant_id, url, now_ms=now_ms(), actor=actor)

    webhook, is_new = await database.write(write)
    if not is_new:
        return WebhookAnswer.of_record(webhook)
    return WebhookMade.of_record(webhook, secret=events.secret_of(pepper, webhook.webhook_id))


async def _get(database: Database, tenant: str) -> WebhookAnswer:
    return WebhookAnswer.of_record(await database.read(lambda conn: _find(conn, tenant)))


async def _remove(database: Database, tenant: str, actor: str) -> WebhookDeleted:
    def write(conn: Connection) -> None:
        tenant_id = _find(conn, tenant).tenant_id
        events.remove_webhook(conn, tenant_id, now_ms=now_ms(), actor=actor)

    await database.write(write)
    return WebhookDeleted()


async def _test(database: Database, tenant: str) -> WebhookEvent:
    def write(conn: Connection) -> Event:
        webhook = _find(conn, tenant)
        if events.num_pending(conn, webhook.tenant_id) >= MAX_PENDING:
            raise Limited(f"{MAX_PENDING} events wait for delivery already.", retry_after_s=60.0)
        event = events.new_event(
            webhook.tenant_id, "webhook.test", {"tenant_id": webhook.tenant_id}, now_ms=now_ms()
        )
        events.insert_event(conn, event)
        return event

    return _event(await database.write(write))


async def _events(database: Database, tenant: str) -> WebhookEventList:
    def read(conn: Connection) -> list[Event]:
        tenant_id = tenants.get_tenant(conn, tenant).tenant_id
        return events.list_events(conn, tenant_id, MAX_EVENTS + 1)

    found = await database.read(read)
    data = [_event(event) for event in found[:MAX_EVENTS]]
    return WebhookEventList(data=data, has_more=len(found) > MAX_EVENTS)


def _find(conn: Connection, tenant: str) -> Webhook:
    found = events.get_webhook(conn, tenants.get_tenant(conn, tenant).tenant_id)
    if found is None:
        raise NotFound("There is no webhook.", code="webhook_not_found")
    return found


def _event(event: Event) -> WebhookEvent:
    return WebhookEvent.of_record(event, next_attempt_at=unix_seconds(event.next_at_ms))
