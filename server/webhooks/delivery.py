"""Delivers webhook events at least once, signed, to public addresses, with waits between tries."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.database.clock import now_ms
from server.database.database import Database
from server.webhooks.events import Event, Webhook, prune_events, signed_headers
from server.webhooks.tables import webhook_events, webhooks
from server.webhooks.urls import BadWebhookUrl, UrlRules, check_url, resolve

INTERVAL_S = 5.0
TIMEOUT_S = 5.0
"""Time limit of one try, from the look-up of the host to the end of the answer."""
MAX_AT_ONCE = 16
"""Events that are sent at the same time."""
MAX_OF_TENANT = 2
"""Share of one tenant in MAX_AT_ONCE, so that a receiver that never answers cannot block all."""
WAITS_MS = (5_000, 30_000, 120_000, 600_000, 3_600_000, 21_600_000)
"""Waits after the first failed try, the second, ...; the last wait is repeated."""
GIVEN_UP_MS = 86_400_000
"""Age of an event after which it is not tried again."""
MAX_ANSWER_BYTES = 1024

_GONE = 410
_MAX_ROUNDS = 100
"""Rounds of MAX_AT_ONCE events in one turn; events that are still due wait for the next turn."""


class WebhookDelivery:
    """Sends the events that are due.

    A lease makes one gateway at a time deliver. Two that deliver the same event are allowed, since
    delivery is at least once.
    """

    def __init__(
        self,
        database: Database,
        pepper: str,
        rules: UrlRules,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._rules = rules
        self._timeout_s = timeout_s
        self._clock = clock

    async def turn(self) -> int:
        """Try to deliver due events, delete old ones, and return the number of tries.

        Raises LedgerUnavailable.
        """
        count = 0
        for _ in range(_MAX_ROUNDS):
            due = await self._database.read(lambda conn: due_events(conn, self._clock()))
            if not due:
                break
            # The client is made only when an event is due: reading the certificates takes 40 ms, in
            # which nothing else runs. It uses no proxy and no .netrc, so that it connects to the
            # address that was checked.
            async with httpx.AsyncClient(
                trust_env=False, follow_redirects=False, timeout=self._timeout_s
            ) as client:
                await asyncio.gather(*(self._try(client, *pair) for pair in due))
            count += len(due)
        await self._database.write(lambda conn: prune_events(conn, self._clock()))
        return count

    async def _try(self, client: httpx.AsyncClient, webhook: Webhook, event: Event) -> None:
        started_ms = self._clock()
        status, error = await self._post(client, webhook, event, started_ms)

        def write(conn: Connection) -> None:
            note_try(conn, event, error, self._clock())
            if status == _GONE:
                gone = sa.update(webhooks).filter_by(webhook_id=webhook.webhook_id)
                conn.execute(gone.values(is_enabled=False))

        await self._database.write(write)

    async def _post(
        self, client: httpx.AsyncClient, webhook: Webhook, event: Event, at_ms: int
    ) -> tuple[int | None, str | None]:
        """Return (status, error). status is None without an answer, error if it was delivered."""
        try:
            async with asyncio.timeout(self._timeout_s):
                url = check_url(webhook.url, self._rules)
                address = await resolve(url, self._rules)
                async with client.stream(
                    "POST",
                    url.copy_with(host=address),
                    content=event.body.encode(),
                    headers={
                        "host": url.netloc.decode(),
                        "content-type": "application/json",
                        "accept-encoding": "identity",
                        "user-agent": "chorale-webhook",
                        **signed_headers(self._pepper, webhook.webhook_id, event, at_ms),
                    },
                    # The certificate must be valid for the host name, not for the address.
                    extensions={"sni_hostname": url.host},
                ) as answer:
                    await _read_little(answer)
        except TimeoutError:
            return None, f"no answer within {self._timeout_s:g} s"
        except BadWebhookUrl as error:
            return None, str(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return None, f"cannot be reached ({type(error).__name__})"
        is_taken = 200 <= answer.status_code < 300
        return answer.status_code, None if is_taken else f"answered {answer.status_code}"


async def _read_little(answer: httpx.Response) -> None:
    """Read an answer of up to MAX_ANSWER_BYTES to its end, so that its connection can be reused."""
    received = 0
    async for chunk in answer.aiter_raw():
        received += len(chunk)
        if received > MAX_ANSWER_BYTES:
            return


def due_events(conn: Connection, at_ms: int) -> list[tuple[Webhook, Event]]:
    """Return the next events to try, longest due first, at most MAX_OF_TENANT of each tenant."""
    event, hook = webhook_events.c, webhooks.c
    place = sa.func.row_number().over(
        partition_by=event.tenant_id, order_by=(event.next_at_ms, event.event_id)
    )
    ranked = (
        sa.select(webhook_events, place.label("place")).where(event.next_at_ms <= at_ms).subquery()
    )
    query = sa.select(
        webhooks, *(ranked.c[name].label(f"event_{name}") for name in Event.__slots__)
    )
    query = query.join(ranked, ranked.c.tenant_id == hook.tenant_id)
    query = query.where(hook.is_enabled, ranked.c.place <= MAX_OF_TENANT)
    query = query.order_by(ranked.c.next_at_ms, ranked.c.event_id).limit(MAX_AT_ONCE)
    return [
        (
            Webhook(**{name: row[name] for name in Webhook.__slots__}),
            Event(**{name: row[f"event_{name}"] for name in Event.__slots__}),
        )
        for row in conn.execute(query).mappings()
    ]


def note_try(conn: Connection, event: Event, error: str | None, at_ms: int) -> Event:
    """Record that a try delivered the event or failed, and return the updated event.

    After a failure, `next_at_ms` is the time of the next try, or None if the event is given up.
    """
    number = event.num_attempts + 1
    again_at_ms = at_ms + WAITS_MS[min(number, len(WAITS_MS)) - 1]
    is_last = error is None or again_at_ms > event.created_at_ms + GIVEN_UP_MS
    after = replace(
        event,
        num_attempts=number,
        next_at_ms=None if is_last else again_at_ms,
        delivered_at_ms=at_ms if error is None else None,
        error=error,
    )
    update = sa.update(webhook_events).filter_by(event_id=event.event_id)
    conn.execute(
        update.values(
            num_attempts=after.num_attempts,
            next_at_ms=after.next_at_ms,
            delivered_at_ms=after.delivered_at_ms,
            error=after.error,
        )
    )
    return after
