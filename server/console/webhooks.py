"""The page of the webhook: its address, the events that tell of it, and how deliveries went."""

from typing import Annotated, Literal

from fastapi import Query, Response
from sqlalchemy import Connection

from server.api.deps import DatabaseDep
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import AdminViewer
from server.database.clock import now_ms
from server.webhooks import events
from server.webhooks.events import KEPT_MS, Event, Webhook
from server.webhooks.urls import MAX_URL_CHARACTERS

router = pages_router("/webhooks")

_PAGE_SIZE = 50

State = Literal["delivered", "waiting", "given up"]
Before = Annotated[str, Query(pattern=r"^(\d{1,16}-evt_[0-9a-f]{24})?$")]


@router.get("")
async def show(viewer: AdminViewer, database: DatabaseDep, before: Before = "") -> Response:
    """Show the webhook and its deliveries.   before: time and id of the last event before."""
    tenant_id = viewer.identity.tenant_id
    at_ms, _, event_id = before.partition("-")
    place = (int(at_ms), event_id) if before else None

    def read(conn: Connection) -> tuple[Webhook | None, list[Event]]:
        found = events.list_events(conn, tenant_id, _PAGE_SIZE + 1, place)
        return events.get_webhook(conn, tenant_id), found

    webhook, found = await database.read(read)
    shown, older_url = found[:_PAGE_SIZE], None
    if len(found) > _PAGE_SIZE:
        older_url = f"/console/webhooks?before={shown[-1].created_at_ms}-{shown[-1].event_id}"
    return render(
        "webhooks.html",
        viewer,
        webhook=webhook,
        is_resting=webhook is not None and webhook.rests_until_ms > now_ms(),
        events=[(event, _state(event)) for event in shown],
        is_waiting=any(event.next_at_ms is not None for event in shown),
        own_url=f"/console/webhooks?before={before}",
        older_url=older_url,
        kept_days=KEPT_MS // 86_400_000,
        max_url=MAX_URL_CHARACTERS,
    )


def _state(event: Event) -> State:
    if event.delivered_at_ms is not None:
        return "delivered"
    return "given up" if event.next_at_ms is None else "waiting"
