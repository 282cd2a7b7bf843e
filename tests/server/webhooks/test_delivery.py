"""The choice of the event that is sent next, when receivers are slow or fail."""

import asyncio
import itertools
from collections import Counter

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.webhooks import events
from server.webhooks.delivery import (
    MAX_AT_ONCE,
    MAX_OF_TENANT,
    MAX_OF_URL,
    MAX_PROBES,
    WAITS_MS,
    WebhookDelivery,
    next_tries,
    note_receiver,
    note_try,
)
from server.webhooks.events import MAX_PENDING, Event, new_event
from server.webhooks.tables import webhook_events, webhooks
from tests.server.factories import NOW_MS, make_tenant

_names = itertools.count()


class Hooks:
    """Webhooks and events on one database, at a time that the test sets."""

    def __init__(self, database):
        self.database = database
        self.now_ms = NOW_MS

    def add(self, url=None):
        """The id of a new tenant with a webhook."""
        tenant_id = make_tenant(self.database, f"t{next(_names)}").tenant_id
        url = url or f"https://{tenant_id}.example/"
        self.database.write_sync(
            lambda c: events.set_webhook(c, tenant_id, url, now_ms=self.now_ms, actor="operator")
        )
        return tenant_id

    def tell(self, tenant_id, number=1):
        told = [new_event(tenant_id, "x", {}, now_ms=self.now_ms) for _ in range(number)]
        self.database.write_sync(lambda c: [events.insert_event(c, event) for event in told])
        return told

    def next(self, *under_way):
        return self.database.read_sync(lambda c: next_tries(c, self.now_ms, under_way))

    def end(self, webhook, event, error=None):
        def write(conn):
            note_try(conn, event, error, self.now_ms)
            note_receiver(conn, webhook, None, error, self.now_ms)

        self.database.write_sync(write)

    def events(self):
        rows = self.database.read_sync(lambda c: c.execute(sa.select(webhook_events)).all())
        return [Event(**row._mapping) for row in rows]


class Answers:
    """A sender whose tries end when the test says so. tries: those under way, the oldest first."""

    def __init__(self):
        self.tries = []
        self.asked = []

    async def send(self, webhook, event, at_ms):
        answer = asyncio.get_running_loop().create_future()
        self.tries.append((webhook.tenant_id, answer))
        self.asked.append(webhook.tenant_id)
        return await answer

    async def close(self):
        pass

    def end(self, error=None):
        self.tries.pop(0)[1].set_result((None, error))

    async def until(self, number):
        """Wait until so many tries were begun."""
        while len(self.asked) < number:
            await asyncio.sleep(0)


@pytest.fixture
def hooks(sqlite_database):
    return Hooks(sqlite_database)


async def test_a_good_tenants_event_is_next_although_six_hundred_of_others_wait(hooks):
    for bad in [hooks.add() for _ in range(12)]:
        hooks.tell(bad, 50)
    good, sender = hooks.add(), Answers()
    # A receiver that fails is asked once more by the try that was under way, and then rests.
    delivery = WebhookDelivery(hooks.database, sender, clock=lambda: hooks.now_ms)
    turn = asyncio.create_task(delivery.turn())
    await sender.until(MAX_AT_ONCE)
    hooks.now_ms += 1
    [event] = hooks.tell(good)
    sender.end("no answer")
    await sender.until(MAX_AT_ONCE + 1)
    assert sender.asked[-1] == good
    while not turn.done():
        if sender.tries:
            sender.end(None if sender.tries[0][0] == good else "no answer")
        await asyncio.sleep(0)
    assert next(e for e in hooks.events() if e.event_id == event.event_id).delivered_at_ms
    assert await turn <= 12 * MAX_OF_TENANT + 1


def test_receivers_that_fail_are_probed_one_event_at_a_time_in_slots_of_their_own(hooks):
    for bad in [hooks.add() for _ in range(MAX_PROBES + 2)]:
        hooks.tell(bad, 3)
    for pair in hooks.next():
        hooks.end(*pair, "no answer")
    assert hooks.next() == []
    hooks.now_ms += WAITS_MS[0]
    good = hooks.add()
    hooks.tell(good)
    chosen = hooks.next()
    assert len(chosen) == 1 + MAX_PROBES
    assert chosen[0][0].tenant_id == good
    assert len({webhook.tenant_id for webhook, _ in chosen}) == len(chosen)
    assert hooks.next(*chosen) == []


def test_a_receiver_rests_longer_after_each_failure_and_is_asked_freely_after_a_success(hooks):
    tenant_id, rests = hooks.add(), []
    hooks.tell(tenant_id, 9)
    for _ in range(6):
        [pair] = hooks.next()
        hooks.end(*pair, "no answer")
        began_ms = hooks.now_ms
        hooks.now_ms = hooks.database.read_sync(
            lambda c: c.scalar(sa.select(webhooks.c.rests_until_ms))
        )
        rests.append(hooks.now_ms - began_ms)
    assert rests == [5_000, 30_000, 120_000, 600_000, 600_000, 600_000]
    [pair] = hooks.next()
    assert hooks.next(pair) == [], "one probe at a time"
    hooks.end(*pair)
    [first] = hooks.next()
    assert len(hooks.next(first)) == 1


def test_an_event_that_was_not_tried_comes_before_the_retries_of_its_tenant(hooks):
    tenant_id = hooks.add()
    [old] = hooks.tell(tenant_id)
    hooks.end(*hooks.next()[0], "no answer")
    hooks.now_ms += WAITS_MS[0]
    [new] = hooks.tell(tenant_id)
    assert [event.event_id for _, event in hooks.next()] == [new.event_id]
    assert old.event_id != new.event_id


def test_of_too_many_events_the_one_that_waited_longest_is_given_up(hooks):
    tenant_id, other = hooks.add(), hooks.add()
    hooks.tell(other)
    [oldest] = hooks.tell(tenant_id)
    hooks.now_ms += 1
    hooks.tell(tenant_id, MAX_PENDING)
    given_up = [event for event in hooks.events() if event.next_at_ms is None]
    assert [(event.event_id, event.error) for event in given_up] == [
        (oldest.event_id, "too many events waited")
    ]


def test_every_tenant_has_its_turn_before_another_has_its_second(hooks):
    tenants = [hooks.add() for _ in range(MAX_AT_ONCE + 4)]
    for tenant_id in tenants:
        hooks.tell(tenant_id, 3)
    under_way, turns = hooks.next(), []
    while len(turns) < len(tenants):
        turns.append(under_way[0][0].tenant_id)
        hooks.now_ms += 1
        hooks.end(*under_way.pop(0))
        under_way += hooks.next(*under_way)
    assert sorted(turns) == sorted(tenants)


class OneTransaction:
    """A database whose reads and writes all happen in one transaction."""

    def __init__(self, conn):
        self.conn = conn

    def write_sync(self, fn):
        return fn(self.conn)

    read_sync = write_sync


_urls = st.lists(st.sampled_from([None, "https://shared.example/"]), min_size=1, max_size=12)
_acts = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 4)), max_size=20)


@given(urls=_urls, acts=_acts)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_tenant_and_no_url_has_more_than_its_share_of_the_slots(sqlite_database, urls, acts):
    with sqlite_database.engine.execution_options(chorale_writes=True).connect() as conn:
        hooks = Hooks(OneTransaction(conn))
        for url in urls:
            hooks.tell(hooks.add(url), 4)
        under_way = []
        for which, is_taken, wait in acts:
            while chosen := hooks.next(*under_way):
                under_way += chosen
            _check_shares(under_way)
            if under_way:
                hooks.end(*under_way.pop(which % len(under_way)), None if is_taken else "no")
            hooks.now_ms += 4_000 * wait
        conn.rollback()


def _check_shares(under_way):
    probes = [webhook for webhook, _ in under_way if webhook.is_failing]
    assert len(probes) <= MAX_PROBES
    assert len(under_way) - len(probes) <= MAX_AT_ONCE
    assert len({event.event_id for _, event in under_way}) == len(under_way)
    assert max(Counter(w.tenant_id for w, _ in under_way).values(), default=0) <= MAX_OF_TENANT
    assert max(Counter(w.url for w, _ in under_way).values(), default=0) <= MAX_OF_URL
    assert max(Counter(w.tenant_id for w in probes).values(), default=0) <= 1
