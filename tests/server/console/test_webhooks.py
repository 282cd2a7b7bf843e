"""The page of the webhook."""

from dataclasses import replace

from server.webhooks.events import Event, insert_event, new_event
from tests.server.console.browsing import SignIn
from tests.server.in_process import InProcess, User

URL = "https://example.com/hook"
AT_MS = 1_770_000_000_000


def insert(user: User, events: list[Event]) -> None:
    database = user.product.gateway.database
    database.write_sync(lambda conn: [insert_event(conn, event) for event in events])


def make_event(user: User, at_ms: int = AT_MS, **changes: object) -> Event:
    event = new_event(user.tenant_id, "webhook.test", {"tenant_id": "t"}, now_ms=at_ms)
    return replace(event, **changes)


def test_without_a_webhook_one_can_be_made_and_no_test_sent(acme: User, signed_in: SignIn) -> None:
    page = signed_in(acme).get("/console/webhooks").text
    assert 'data-show="secret"' in page
    assert "/v1/webhook/test" not in page


def test_a_webhook_is_shown_without_its_secret(acme: User, signed_in: SignIn) -> None:
    made = acme.call("PUT", "/v1/webhook", {"url": URL}).json()
    page = signed_in(acme).get("/console/webhooks").text
    assert made["webhook_id"] in page
    assert f'value="{URL}"' in page
    assert made["secret"] not in page
    assert "data-show" not in page


def test_events_are_shown_with_the_state_of_their_delivery(acme: User, signed_in: SignIn) -> None:
    delivered = make_event(acme, num_attempts=1, next_at_ms=None, delivered_at_ms=AT_MS + 7)
    given_up = make_event(acme, num_attempts=9, next_at_ms=None, error="status <500>")
    insert(acme, [delivered, given_up])
    page = signed_in(acme).get("/console/webhooks").text
    assert "hx-trigger" not in page  # nothing changes any more
    insert(acme, [make_event(acme, AT_MS + 1)])
    page = signed_in(acme).get("/console/webhooks").text
    assert 'hx-trigger="every 2s"' in page
    places = [page.index(f">{state}</span>") for state in ("waiting", "delivered", "given up")]
    assert places[0] == min(places)  # the newest is first
    assert "status &lt;500&gt;" in page


def test_a_page_of_events_leads_to_the_older_ones(acme: User, signed_in: SignIn) -> None:
    events = [make_event(acme, AT_MS + at // 3, next_at_ms=None) for at in range(120)]
    insert(acme, events)
    visitor, seen, url = signed_in(acme), [], "/console/webhooks"
    while url:
        page = visitor.get(url).text
        seen += [event.event_id for event in events if f'id="{event.event_id}"' in page]
        _, _, rest = page.partition('class="button" href="')
        url = rest.partition('"')[0]
    assert len(seen) == 120
    assert set(seen) == {event.event_id for event in events}


def test_another_tenants_webhook_and_events_are_not_shown(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    acme.call("PUT", "/v1/webhook", {"url": URL})
    event = make_event(acme)
    insert(acme, [event])
    other = product.user(f"not-{acme.name}", scopes=frozenset({"admin"}))
    page = signed_in(other).get("/console/webhooks").text
    assert URL not in page
    assert event.event_id not in page
