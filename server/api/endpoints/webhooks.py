"""A tenant's webhook: its admin or the operator sets it, tests it and lists its events."""

from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.errors import Limited, NotFound
from server.accounts.auth import ADMIN
from server.api.accounts import AccountEndpoints, RowsDep
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import PepperDep, WebhookRulesDep
from server.database.clock import now_ms
from server.text.times import unix_seconds
from server.webhooks import events
from server.webhooks.events import MAX_PENDING, Event, EventType, Webhook
from server.webhooks.urls import MAX_URL_CHARACTERS, check_url

both = AccountEndpoints()

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


@both("PUT", "/webhook", ADMIN, name="set_webhook_of")
async def set_webhook(
    rows: RowsDep, pepper: PepperDep, webhook_rules: WebhookRulesDep, body: Body
) -> WebhookAnswer | WebhookMade:
    """Set the URL of the tenant's webhook.

    The first answer carries the secret, which stays the same when the URL changes.
    """
    check_url(body.url, webhook_rules)
    url, actor = body.url, rows.account.actor
    webhook, is_new = await rows.write(
        lambda conn, tenant_id: events.set_webhook(
            conn, tenant_id, url, now_ms=now_ms(), actor=actor
        )
    )
    if not is_new:
        return WebhookAnswer.of_record(webhook)
    return WebhookMade.of_record(webhook, secret=events.secret_of(pepper, webhook.webhook_id))


@both("GET", "/webhook", ADMIN, name="get_webhook_of")
async def get_webhook(rows: RowsDep) -> WebhookAnswer:
    """Get the tenant's webhook."""
    return WebhookAnswer.of_record(await rows.read(_find))


@both("DELETE", "/webhook", ADMIN, name="remove_webhook_of")
async def remove_webhook(rows: RowsDep) -> WebhookDeleted:
    """Remove the tenant's webhook."""

    def write(conn: Connection, tenant_id: str) -> None:
        _find(conn, tenant_id)
        events.remove_webhook(conn, tenant_id, now_ms=now_ms(), actor=rows.account.actor)

    await rows.write(write)
    return WebhookDeleted()


@both("POST", "/webhook/test", ADMIN, name="send_test_of", status_code=202)
async def send_test(rows: RowsDep) -> WebhookEvent:
    """Send a test event to the tenant's webhook; it is delivered within seconds."""

    def write(conn: Connection, tenant_id: str) -> Event:
        _find(conn, tenant_id)
        if events.num_pending(conn, tenant_id) >= MAX_PENDING:
            raise Limited(f"{MAX_PENDING} events wait for delivery already.", retry_after_s=60.0)
        data = {"tenant_id": tenant_id}
        event = events.new_event(tenant_id, "webhook.test", data, now_ms=now_ms())
        events.insert_event(conn, event)
        return event

    return _event(await rows.write(write))


@both("GET", "/webhook/events", ADMIN, name="list_events_of")
async def list_events(rows: RowsDep) -> WebhookEventList:
    """List the tenant's webhook events, newest first, with the state of their delivery."""
    found = await rows.read(
        lambda conn, tenant_id: events.list_events(conn, tenant_id, MAX_EVENTS + 1)
    )
    data = [_event(event) for event in found[:MAX_EVENTS]]
    return WebhookEventList(data=data, has_more=len(found) > MAX_EVENTS)


def _find(conn: Connection, tenant_id: str) -> Webhook:
    found = events.get_webhook(conn, tenant_id)
    if found is None:
        raise NotFound("There is no webhook.", code="webhook_not_found")
    return found


def _event(event: Event) -> WebhookEvent:
    return WebhookEvent.of_record(event, next_attempt_at=unix_seconds(event.next_at_ms))
