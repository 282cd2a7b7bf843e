import asyncio
import base64
import hmac
import ipaddress
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import pytest
import sqlalchemy as sa

from registry.errors import Invalid
from server.accounts.auth import ADMIN, INFERENCE
from server.billing import budgets, ledger
from server.billing.budget_watch import EXHAUSTED, REACHED, BudgetWatch
from server.billing.budgets import BudgetExhausted
from server.billing.credits import post_credit
from server.billing.holds import insert_hold
from server.billing.months import end_of, month_of
from server.database.clock import now_ms
from server.inference.limit_refusals import LimitRefusals
from server.limits.rules import Limit
from server.webhooks import events
from server.webhooks.delivery import (
    GIVEN_UP_MS,
    WAITS_MS,
    WebhookDelivery,
    note_try,
)
from server.webhooks.events import KEPT_MS, Event, new_event
from server.webhooks.sender import HttpSender
from server.webhooks.tables import webhook_events
from server.webhooks.urls import UrlRules, check_url, is_public
from tests.server.factories import (
    NOW_MS,
    PEPPER,
    SIGNER,
    limit_budget,
    make_end,
    make_hold,
    make_price,
    make_tenant,
)

ANYWHERE = UrlRules(allow_http=True, allow_private=True)


@dataclass
class Receiver:
    """A real server. answers: (status, headers) of the first requests; later ones get a 204."""

    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    received: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    is_slow: bool = False

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made.received.append((self.path, headers, body))
            if made.is_slow:
                made.released.wait(20)
                return
            status, headers = made.answers.pop(0) if made.answers else (204, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def hook(database, url, name="acme"):
    tenant = make_tenant(database, name)
    return database.write_sync(
        lambda c: events.set_webhook(c, tenant.tenant_id, url, now_ms=NOW_MS, actor="operator")
    )[0]


def tell(database, tenant_id, type="webhook.test", at_ms=NOW_MS):
    event = new_event(tenant_id, type, {"n": 1}, now_ms=at_ms)
    database.write_sync(lambda c: events.insert_event(c, event))
    return event


def deliver(database, rules=ANYWHERE, at_ms=NOW_MS, **options):
    sender = HttpSender(PEPPER, rules, **options)
    return asyncio.run(WebhookDelivery(database, sender, clock=lambda: at_ms).turn())


def events_of(database):
    query = sa.select(webhook_events).order_by(webhook_events.c.event_id)
    return database.read_sync(lambda c: [Event(**row._mapping) for row in c.execute(query)])


# ---- delivery ----


def test_an_event_is_delivered_once_signed_with_the_secret_that_was_shown(
    sqlite_database, receiver
):
    webhook = hook(sqlite_database, receiver.url)
    event = tell(sqlite_database, webhook.tenant_id)
    assert deliver(sqlite_database) == 1
    assert deliver(sqlite_database) == 0
    [(path, headers, body)] = receiver.received
    assert (path, headers["host"]) == ("/hook", f"localhost:{receiver.port}")
    assert json.loads(body)["type"] == "webhook.test"
    # The signature is checked as a receiver does by the rules of Standard Webhooks.
    key = base64.b64decode(events.secret_of(PEPPER, webhook.webhook_id).removeprefix("whsec_"))
    signed = b".".join((event.event_id.encode(), headers["webhook-timestamp"].encode(), body))
    signature = base64.b64encode(hmac.new(key, signed, "sha256").digest()).decode()
    assert headers["webhook-id"] == event.event_id
    assert headers["webhook-signature"] == f"v1,{signature}"
    assert headers["webhook-timestamp"] == str(NOW_MS // 1000)
    [after] = events_of(sqlite_database)
    assert (after.delivered_at_ms, after.next_at_ms, after.error) == (NOW_MS, None, None)


def test_a_failed_delivery_is_tried_again_under_the_same_id_and_signed_anew(
    sqlite_database, receiver
):
    receiver.answers = [(500, {})]
    tell(sqlite_database, hook(sqlite_database, receiver.url).tenant_id)
    deliver(sqlite_database)
    [failed] = events_of(sqlite_database)
    assert (failed.num_attempts, failed.error) == (1, "answered 500")
    assert failed.next_at_ms == NOW_MS + WAITS_MS[0]
    assert deliver(sqlite_database, at_ms=failed.next_at_ms - 1) == 0
    assert deliver(sqlite_database, at_ms=failed.next_at_ms) == 1
    first, second = (headers for _, headers, _ in receiver.received)
    assert first["webhook-id"] == second["webhook-id"]
    assert first["webhook-signature"] != second["webhook-signature"]
    assert events_of(sqlite_database)[0].delivered_at_ms == failed.next_at_ms


def test_tries_are_further_and_further_apart_and_end_after_a_day(sqlite_database):
    event, waits = tell(sqlite_database, "t"), []
    while event.next_at_ms is not None:
        before = event.next_at_ms
        sqlite_database.write_sync(partial(note_try, event=event, error="no", at_ms=before))
        [event] = events_of(sqlite_database)
        waits.append((event.next_at_ms or before) - before)
    assert tuple(waits[: len(WAITS_MS)]) == WAITS_MS
    assert set(waits[len(WAITS_MS) : -1]) == {WAITS_MS[-1]}
    assert sum(waits) <= GIVEN_UP_MS < sum(waits) + WAITS_MS[-1]


def test_a_redirect_is_not_followed_and_a_receiver_that_is_gone_is_asked_no_more(
    sqlite_database, receiver
):
    webhook = hook(sqlite_database, receiver.url)
    receiver.answers = [(302, {"location": "/elsewhere"}), (410, {})]
    tell(sqlite_database, webhook.tenant_id)
    deliver(sqlite_database)
    assert [path for path, _, _ in receiver.received] == ["/hook"]
    tell(sqlite_database, webhook.tenant_id)
    deliver(sqlite_database, at_ms=NOW_MS + WAITS_MS[0])
    tell(sqlite_database, webhook.tenant_id)
    assert deliver(sqlite_database, at_ms=NOW_MS + 10**6) == 0
    assert len(receiver.received) == 2


def test_a_receiver_that_never_answers_is_left(sqlite_database, receiver):
    receiver.is_slow = True
    tell(sqlite_database, hook(sqlite_database, receiver.url).tenant_id)
    assert deliver(sqlite_database, timeout_s=0.2) == 1
    assert events_of(sqlite_database)[0].error == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("rules", "why"),
    [(UrlRules(allow_http=True), "public"), (UrlRules(allow_private=True), "https")],
)
def test_what_may_not_be_sent_to_is_not_connected_to(sqlite_database, receiver, rules, why):
    tell(sqlite_database, hook(sqlite_database, receiver.url).tenant_id)
    deliver(sqlite_database, rules)
    assert receiver.received == []
    assert why in events_of(sqlite_database)[0].error


def test_old_events_are_forgotten(sqlite_database, receiver):
    webhook = hook(sqlite_database, receiver.url)
    old = tell(sqlite_database, webhook.tenant_id, at_ms=NOW_MS - KEPT_MS - 1)
    new = tell(sqlite_database, webhook.tenant_id, at_ms=NOW_MS - KEPT_MS)
    deliver(sqlite_database)
    left = [event.event_id for event in events_of(sqlite_database)]
    assert (new.event_id in left, old.event_id in left) == (True, False)


# ---- addresses ----


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0",
        "100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1",
        "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254",
        "fec0::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1",
        "2002:a00:1::", "2001:0:a00:1::", "2001:db8::1", "::127.0.0.1",
    ],
)  # fmt: skip
def test_an_address_inside_is_not_public(address):
    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(Invalid, match="public"):
        check_url(f"https://{host}/", UrlRules())


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_an_address_of_the_internet_is_public(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/", "ftp://hooks.example/", "hooks.example", "https://", "",
        "https://user:secret@hooks.example/", "https://hooks.example/#x", "https://a b/",
        "https://hooks.example/\n", "https://h\u00e4.example/", "https://" + "a" * 2050,
        "https://2130706433/\x00", "https://[::1/",
    ],
)  # fmt: skip
def test_what_is_no_https_url_of_a_host_is_refused(url):
    with pytest.raises(Invalid):
        check_url(url, UrlRules())


# ---- budgets ----


@dataclass
class Told:
    """A tenant with a webhook and budgets, whose events are read back."""

    database: object
    at_ms: int = NOW_MS
    seq: int = 0

    def __post_init__(self):
        self.price = make_price(self.database)
        self.tenant_id = hook(self.database, "https://hooks.example/").tenant_id

    def limit(self, kind, enforcement, amount):
        limit_budget(self.database, self.tenant_id, amount, kind, enforcement)

    def use(self):
        """Post a request of 7 prompt and 5 completion tokens, which costs 4,050 nano-dollars."""
        self.seq += 1
        name = f"r{self.seq}"

        def write(conn):
            insert_hold(conn, make_hold(self.price, name, tenant_id=self.tenant_id))
            end = make_end(self.seq, name, tenant_id=self.tenant_id, at=self.at_ms / 1000)
            ledger.post(conn, SIGNER, "engine-1", [end], self.at_ms)

        self.database.write_sync(write)

    def refuse(self, kind, needed):
        refused = BudgetExhausted(kind, needed)
        self.database.write_sync(lambda c: budgets.note_refusal(c, self.tenant_id, refused))

    def pay(self, amount):
        self.seq += 1
        self.database.write_sync(
            lambda c: post_credit(
                c, SIGNER, "payment", self.tenant_id, amount,
                memo=None, idempotency_key=f"pay {self.seq}", now_ms=self.at_ms,
            )
        )  # fmt: skip

    def look(self):
        """Check the budgets twice; return the types of the events that this made."""
        known = {event.event_id for event in events_of(self.database)}
        for _ in range(2):
            asyncio.run(BudgetWatch(self.database, clock=lambda: self.at_ms).turn())
        found = events_of(self.database)
        return sorted(event.type for event in found if event.event_id not in known)


def test_a_soft_monthly_budget_is_told_once_a_month_and_again_for_another_amount(each_database):
    told = Told(each_database)
    told.limit("monthly", "soft", 8_000)
    told.use()
    assert told.look() == [REACHED], "half of it"
    told.use()
    assert told.look() == [REACHED]
    told.use()
    assert told.look() == []
    told.limit("monthly", "soft", 12_000)
    assert told.look() == [REACHED]
    told.at_ms += 31 * 86_400_000
    assert told.look() == []
    for _ in range(3):
        told.use()
    assert told.look() == [REACHED]
    [*_, last] = sorted(events_of(each_database), key=lambda event: event.created_at_ms)
    data = json.loads(last.body)["data"]
    assert (data["month"], data["spent_nanousd"]) == ("2026-03", 3 * 4_050)
    assert data["tenant_id"] == told.tenant_id


def test_a_prepaid_budget_is_told_at_every_fall_below_it(database):
    told = Told(database)
    told.limit("prepaid", "soft", 5_000)
    told.pay(10_000)
    told.use()
    assert told.look() == []
    told.use()
    assert told.look() == [REACHED]
    told.use()
    assert told.look() == []
    told.pay(10_000)
    assert told.look() == []
    told.use()
    told.use()
    assert told.look() == [REACHED]


@pytest.mark.parametrize(("enforcement", "last"), [("soft", []), ("hard", [EXHAUSTED])])
def test_each_threshold_of_a_monthly_budget_is_told_once(sqlite_database, enforcement, last):
    told = Told(sqlite_database)
    told.limit("monthly", enforcement, 10 * 4_050)
    for number in range(1, 11):
        told.use()
        expected = {5: [REACHED], 8: [REACHED], 10: [*last, REACHED]}
        assert told.look() == expected.get(number, [])
    bodies = [json.loads(event.body)["data"] for event in events_of(sqlite_database)]
    assert sorted(body["percent"] for body in bodies if "percent" in body) == [50, 80, 100]


@pytest.mark.parametrize("kind", ["monthly", "prepaid"])
def test_a_hard_budget_is_used_up_when_it_does_not_cover_what_it_refused(database, kind):
    told = Told(database)
    told.limit(kind, "hard", 4_150 if kind == "monthly" else 0)
    told.pay(4_150)
    told.use()
    told.refuse(kind, 100)
    assert EXHAUSTED not in told.look(), "only holds were in its way"
    told.limit(kind, "hard", 4_149 if kind == "monthly" else 1)
    told.refuse(kind, 100)
    assert EXHAUSTED in told.look()
    told.refuse(kind, 359)
    assert told.look() == []


def test_who_has_no_webhook_is_told_nothing(sqlite_database):
    told = Told(sqlite_database)
    told.limit("monthly", "soft", 0)
    sqlite_database.write_sync(
        lambda c: events.remove_webhook(c, told.tenant_id, now_ms=NOW_MS, actor="operator")
    )
    assert told.look() == []


# ---- limits ----


def test_a_limit_that_refused_is_told_once_an_hour_by_the_gateway_that_is_first(sqlite_database):
    limit = Limit("tokens", "tenant", hook(sqlite_database, "https://hooks.example/").tenant_id, 60)
    others = replace(limit, scope="key"), replace(limit, scope_id="who has no webhook")
    clock, known, told = [NOW_MS], [], []
    gateways = [LimitRefusals(sqlite_database, lambda: clock[0]) for _ in range(2)]
    for hours, *counts in ((0, 3, 4), (0, 2, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0)):
        clock[0] += hours * 3_600_000
        for gateway, count in zip(gateways, counts, strict=True):
            for noted in (*[limit] * count, *others):
                gateway.note(noted)
            asyncio.run(gateway.tell())
        made = [event for event in events_of(sqlite_database) if event not in known]
        known += made
        told.append([json.loads(event.body)["data"]["num_refused"] for event in made])
    # In later hours come the refusals that no event has told of.
    assert told == [[3], [], [2], [4], []]


def test_the_page_for_tenants_names_every_type_of_event():
    page = (Path(__file__).parents[3] / "docs" / "tenant" / "limits.md").read_text()
    assert [type for type in get_args(events.EventType) if f"`{type}`" not in page] == []


# ---- over HTTP ----


def test_a_tenants_admin_sets_its_webhook_and_sees_the_secret_once(product):
    admin = product.user("acme", scopes={ADMIN})
    url = "https://hooks.example/a"
    assert admin.call("GET", "/v1/webhook").json()["error"]["code"] == "webhook_not_found"
    made = admin.call("PUT", "/v1/webhook", {"url": url}).json()
    secret = events.secret_of(product.gateway.pepper, made["webhook_id"])
    assert (made["url"], made["secret"], made["is_enabled"]) == (url, secret, True)
    changed = admin.call("PUT", "/v1/webhook", {"url": url + "b"}).json()
    assert {**changed, "url": url, "secret": secret} == made
    assert "secret" not in changed
    assert admin.call("GET", "/v1/webhook").json() == changed
    assert admin.call("DELETE", "/v1/webhook").status_code == 200
    again = admin.call("PUT", "/v1/webhook", {"url": url}).json()
    assert again["secret"] != secret


def test_a_webhook_is_tested_and_its_events_are_listed(product):
    admin = product.user("acme", scopes={ADMIN})
    assert admin.call("POST", "/v1/webhook/test").status_code == 404
    admin.call("PUT", "/v1/webhook", {"url": "https://hooks.example/"})
    sent = admin.call("POST", "/v1/webhook/test")
    assert (sent.status_code, sent.json()["type"]) == (202, "webhook.test")
    assert admin.call("GET", "/v1/webhook/events").json()["data"] == [sent.json()]
    admin.call("DELETE", "/v1/webhook")
    [event] = product.operator.call("GET", "/admin/v1/tenants/acme/webhook/events").json()["data"]
    assert (event["next_attempt_at"], event["error"]) == (None, "the webhook was removed")


def test_tests_that_wait_for_delivery_are_bounded(product):
    admin = product.user("acme", scopes={ADMIN})
    admin.call("PUT", "/v1/webhook", {"url": "https://hooks.example/"})
    for _ in range(events.MAX_PENDING):
        tell(product.gateway.database, admin.tenant_id)
    assert admin.call("POST", "/v1/webhook/test").status_code == 429


def test_refusals_by_a_tenants_limit_become_an_event(product):
    admin = product.user("acme", scopes={ADMIN, INFERENCE})
    product.operator.call("PATCH", "/admin/v1/tenants/acme", {"requests_per_minute": 1})
    admin.call("PUT", "/v1/webhook", {"url": "https://hooks.example/"})
    prompts = ("one", "long " * 1000, "short")
    assert [admin.complete("base", prompt=p).status_code for p in prompts] == [200, 429, 429]
    assert admin.call("POST", "/tokenize", {"prompt": "Hello"}).status_code == 429
    asyncio.run(product.gateway.limit_refusals.tell())
    [event] = admin.call("GET", "/v1/webhook/events").json()["data"]
    data = {"tenant_id": admin.tenant_id, "metric": "requests", "limit": 1, "num_refused": 3}
    assert (event["type"], json.loads(event["body"])["data"]) == ("limit.reached", data)


@pytest.mark.parametrize("url", ["http://hooks.example/", "https://10.0.0.1/", 7, None])
def test_a_webhook_that_may_not_be_sent_to_is_not_set(product, url):
    admin = product.user("acme", scopes={ADMIN})
    answer = admin.call("PUT", "/v1/webhook", {"url": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "url")


def test_the_refusal_of_a_url_names_the_schemes_that_are_allowed():
    for rules, schemes in ((UrlRules(), "https://."), (ANYWHERE, "https:// or http://.")):
        with pytest.raises(Invalid) as refused:
            check_url("ftp://hooks.example/", rules)
        assert str(refused.value) == f"url must begin with {schemes}"


def test_budgets_are_set_by_the_operator_and_read_by_their_tenant(product):
    user, operator = product.user("acme"), product.operator
    path = "/admin/v1/tenants/acme/budgets/monthly/hard"
    assert operator.call("GET", path).json()["error"]["code"] == "budget_not_found"
    made = operator.call("PUT", path, {"amount": "12.50"}).json()
    assert (made["amount"], made["amount_nanousd"]) == ("12.500000000", 12_500_000_000)
    assert (made["remaining_nanousd"], made["held_nanousd"]) == (12_500_000_000, 0)
    assert (made["spent_nanousd"], made["status"]) == (0, "inactive")
    assert end_of(month_of(now_ms())) == made["resets_at"] * 1000
    assert operator.call("GET", path).json() == made
    assert user.call("GET", "/v1/budgets").json()["data"] == [made]
    operator.call("PUT", path, {"amount": "0"})
    [now] = operator.call("GET", "/admin/v1/tenants/acme/budgets").json()["data"]
    assert (now["amount_nanousd"], now["status"]) == (0, "enforcing")
    operator.call("PUT", path.replace("monthly", "prepaid"), {"amount": "1"})
    prepaid = user.call("GET", "/v1/budgets").json()["data"][1]
    assert (prepaid["balance_nanousd"], prepaid["resets_at"]) == (0, None)
    assert operator.call("DELETE", path).json()["deleted"]
    assert operator.call("DELETE", path).status_code == 404


@pytest.mark.parametrize("amount", ["-1", "1e3", "", "1.0000000001", "12345678", "1,5", 5, None])
def test_an_amount_is_exact_decimal_dollars(product, amount):
    product.user("acme")
    path = "/admin/v1/tenants/acme/budgets/monthly/hard"
    answer = product.operator.call("PUT", path, {"amount": amount})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "amount")


def test_a_tenants_monthly_budget_is_its_hard_one(product):
    operator = product.operator
    made = operator.call("POST", "/admin/v1/tenants", {"name": "acme", "monthly_budget": "12.5"})
    assert made.json()["monthly_budget"] == "12.500000000"
    [budget] = operator.call("GET", "/admin/v1/tenants/acme/budgets").json()["data"]
    assert (budget["kind"], budget["enforcement"]) == ("monthly", "hard")
    changed = operator.call("PATCH", "/admin/v1/tenants/acme", {"weight": 2}).json()
    assert changed["monthly_budget"] == "12.500000000"
    changed = operator.call("PATCH", "/admin/v1/tenants/acme", {"monthly_budget": None}).json()
    assert changed["monthly_budget"] is None
    assert operator.call("GET", "/admin/v1/tenants/acme/budgets").json()["data"] == []
    assert operator.call("GET", "/admin/v1/tenants/acme").json() == changed
    assert operator.call("GET", "/admin/v1/tenants").json()["data"] == [changed]
