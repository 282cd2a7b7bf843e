"""Delivers webhook events at least once; chooses who is next, and records how tries went.

The tenant whose last try is longest ago is next, and of its events one that was not tried yet. A
receiver that failed rests, longer after each failure in a row; then one event at a time probes it.
Probes have slots of their own, so that receivers that never answer do not delay the others.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.database.clock import now_ms
from server.database.database import Database
from server.text.json_object import JsonObject
from server.webhooks.events import Event, Webhook, prune_events
from server.webhooks.sender import Sender
from server.webhooks.tables import webhook_events, webhooks

INTERVAL_S = 5.0
MAX_AT_ONCE = 16
"""Events that are sent at the same time, without probes."""
MAX_PROBES = 4
"""Receivers that are probed at the same time."""
MAX_OF_TENANT = 2
MAX_OF_URL = 4
"""Events that are sent at the same time for one tenant, and to one URL, which tenants may share."""
WAITS_MS = (5_000, 30_000, 120_000, 600_000, 3_600_000, 21_600_000)
"""Waits after the first failed try of an event, the second, ...; the last wait is repeated."""
MAX_REST_MS = 600_000
"""Longest rest of a receiver; its rests are the waits up to here."""
GIVEN_UP_MS = 86_400_000
"""Age of an event after which it is not tried again."""

_GONE = 410
_MAX_TRIES = 1600
"""Tries in one turn; events that are still due wait for the next turn."""

Try = tuple[Webhook, Event]


class WebhookDelivery:
    """Sends the events that are due.

    A lease makes one gateway at a time deliver. Two that deliver the same event are allowed, since
    delivery is at least once.
    """

    def __init__(
        self, database: Database, sender: Sender, *, clock: Callable[[], int] = now_ms
    ) -> None:
        self._database = database
        self._sender = sender
        self._clock = clock

    async def turn(self) -> int:
        """Try to deliver due events, delete old ones, and return the number of tries.

        Raises LedgerUnavailable.
        """
        count = 0
        under_way: dict[asyncio.Task[None], Try] = {}
        try:
            while True:
                while count < _MAX_TRIES and (chosen := await self._choose(under_way.values())):
                    under_way |= {asyncio.create_task(self._try(*pair)): pair for pair in chosen}
                    count += len(chosen)
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del under_way[task]
                    task.result()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self._sender.close()
        await self._database.write(lambda conn: prune_events(conn, self._clock()))
        return count

    async def _choose(self, under_way: Collection[Try]) -> list[Try]:
        return await self._database.read(lambda c: next_tries(c, self._clock(), under_way))

    async def _try(self, webhook: Webhook, event: Event) -> None:
        status, error = await self._sender.send(webhook, event, self._clock())

        def write(conn: Connection) -> None:
            note_try(conn, event, error, self._clock())
            note_receiver(conn, webhook, status, error, self._clock())

        await self._database.write(write)


def next_tries(conn: Connection, at_ms: int, under_way: Collection[Try]) -> list[Try]:
    """The next events to send beside those under way, at most one of a tenant.

    After these are under way, another call may choose more. No call does when nothing may be sent.
    """
    chosen = _next_of(conn, at_ms, under_way, is_failing=False)
    return chosen + _next_of(conn, at_ms, [*under_way, *chosen], is_failing=True)


def _next_of(
    conn: Connection, at_ms: int, under_way: Collection[Try], *, is_failing: bool
) -> list[Try]:
    """The next events for the receivers that failed last time, or for the others."""
    slots, max_of_tenant = (MAX_PROBES, 1) if is_failing else (MAX_AT_ONCE, MAX_OF_TENANT)
    room = slots - sum(webhook.is_failing == is_failing for webhook, _ in under_way)
    if room <= 0:
        return []
    tenants = Counter(webhook.tenant_id for webhook, _ in under_way)
    urls = Counter(webhook.url for webhook, _ in under_way)
    event, hook = webhook_events.c, webhooks.c
    # An event that was not tried yet comes first, so that the retries of some do not delay it.
    order = (event.num_attempts > 0, event.next_at_ms, event.event_id)
    place = sa.func.row_number().over(partition_by=event.tenant_id, order_by=order)
    ranked = sa.select(webhook_events, place.label("place")).where(
        event.next_at_ms <= at_ms, event.event_id.not_in([sent.event_id for _, sent in under_way])
    )
    due = ranked.subquery().c
    query = sa.select(webhooks, *(due[name].label(f"event_{name}") for name in Event.__slots__))
    query = query.where(due.tenant_id == hook.tenant_id, due.place == 1, hook.is_enabled)
    query = query.where((hook.num_failures > 0) == is_failing, hook.rests_until_ms <= at_ms)
    # Those that are full are left out here, so that they cannot fill the answer.
    query = query.where(hook.tenant_id.not_in(_full(tenants, max_of_tenant)))
    query = query.where(hook.url.not_in(_full(urls, MAX_OF_URL)))
    query = query.order_by(hook.tenant_id.in_(list(tenants)), hook.tried_at_ms, hook.tenant_id)
    chosen = []
    for row in conn.execute(query.limit(room)).mappings():
        webhook = Webhook(**{name: row[name] for name in Webhook.__slots__})
        urls[webhook.url] += 1
        if urls[webhook.url] <= MAX_OF_URL:
            fields = {name: row[f"event_{name}"] for name in Event.__slots__}
            chosen.append((webhook, Event(**fields)))
    return chosen


def _full(counts: Counter[str], most: int) -> list[str]:
    return [name for name, count in counts.items() if count >= most]


def note_try(conn: Connection, event: Event, error: str | None, at_ms: int) -> None:
    """Record that a try delivered an event or failed, and when the next try is, if there is one."""
    number = event.num_attempts + 1
    again_at_ms = at_ms + WAITS_MS[min(number, len(WAITS_MS)) - 1]
    is_last = error is None or again_at_ms > event.created_at_ms + GIVEN_UP_MS
    noted: JsonObject = {
        "num_attempts": number,
        "next_at_ms": None if is_last else again_at_ms,
        "delivered_at_ms": at_ms if error is None else None,
        "error": error,
    }
    update = sa.update(webhook_events).filter_by(event_id=event.event_id)
    conn.execute(update.values(**noted))


def note_receiver(
    conn: Connection, webhook: Webhook, status: int | None, error: str | None, at_ms: int
) -> None:
    """Record how a receiver answered: after a failure it rests, after a 410 it is asked no more.

    webhook: as it was before the try; if its URL has changed since, nothing is recorded.
    """
    num_failures, rest_ms = 0, 0
    if error is not None:
        num_failures = webhook.num_failures + 1
        rest_ms = min(WAITS_MS[min(num_failures, len(WAITS_MS)) - 1], MAX_REST_MS)
    values = {"tried_at_ms": at_ms, "num_failures": num_failures, "rests_until_ms": at_ms + rest_ms}
    if status == _GONE:
        values["is_enabled"] = False
    update = sa.update(webhooks).filter_by(webhook_id=webhook.webhook_id, url=webhook.url)
    conn.execute(update.values(**values))
