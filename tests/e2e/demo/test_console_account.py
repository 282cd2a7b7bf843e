"""The console's pages of an account in a real browser: keys and limits, bill, webhooks."""

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from server.billing.months import end_of, month_of
from server.billing.receipts.signing import Signer
from server.billing.statements import Statements
from server.database.clock import now_ms
from server.database.database import Database
from server.launch.secrets import Secrets
from tests.e2e.stack import Stack, Tenant

TENANT = "hooli"
SCOPES = ["admin", "inference", "usage:read"]


def make_key(tenant: Tenant, name: str, **terms: object) -> str:
    path, body = f"/admin/v1/tenants/{tenant.name}/keys", {"name": name, "scopes": SCOPES, **terms}
    made = tenant.stack.operator.post(path, json=body)
    assert made.status_code == 201, made.text
    return made.json()["api_key"]


@pytest.fixture(scope="module")
def key(tenant: Tenant) -> str:
    return make_key(tenant, "of the session", requests_per_minute=6)


@pytest.fixture
def receiver() -> Iterator[str]:
    """The URL of a server that takes every event."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://localhost:{server.server_port}/hook"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(stack: Stack, key: str) -> httpx.Response:
    body = {"model": "base", "prompt": "Hello", "max_tokens": 1}
    return stack.client(key).post("/v1/completions", json=body)


def test_a_key_that_is_made_on_the_page_works_until_it_is_revoked_there(
    page: Page, demo_stack: Stack
) -> None:
    page.goto(f"{demo_stack.base_url}/console/keys")
    page.get_by_label("Name").fill("made here")
    page.get_by_label("Tokens per minute").fill("5000")
    page.get_by_label("Ends (UTC)").fill("2060-01-02T03:04:05")
    page.get_by_label("usage:read").uncheck()
    # A refusal is said in the form, and leads to its field.
    limit = page.get_by_label("Requests per minute", exact=True)
    limit.fill("7")
    page.get_by_role("button", name="Make the key").click()
    expect(page.get_by_role("alert")).to_contain_text("may not be above this API key's own")
    expect(limit).to_be_focused()
    limit.fill("")
    page.get_by_role("button", name="Make the key").click()
    key = page.locator(".secret code").inner_text()
    # It is in the list at once, and a button copies it.
    expect(page.get_by_role("row", name="made here")).to_contain_text("valid")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert ask(demo_stack, key).status_code == 200
    page.get_by_role("button", name="I have kept it").click()
    expect(page.locator(".secret")).to_have_count(0)
    assert key not in page.content()
    page.get_by_role("row", name="made here").get_by_role("link").first.click()
    expect(page.get_by_text("2060-01-02 03:04:05")).to_be_visible()
    expect(page.get_by_text("5,000 tokens per minute")).to_be_visible()
    expect(page.get_by_label("inference")).to_be_checked()
    expect(page.get_by_label("usage:read")).not_to_be_checked()
    page.get_by_role("button", name="Revoke this key").click()
    expect(page.get_by_role("row", name="made here")).to_contain_text("revoked")
    demo_stack.wait(lambda: ask(demo_stack, key).status_code == 401)


def test_a_change_sends_what_was_changed_alone_and_the_next_key_is_shown_once(
    page: Page, demo_stack: Stack, key: str
) -> None:
    # A key may change those that it made itself.
    body = {"name": "to be changed", "scopes": SCOPES}
    assert demo_stack.client(key).post("/v1/keys", json=body).status_code == 201
    page.goto(f"{demo_stack.base_url}/console/keys")
    page.get_by_role("row", name="to be changed").get_by_role("link").first.click()
    page.get_by_label("Name").fill("renamed")
    with page.expect_request("**/v1/keys/*") as sent:
        page.get_by_role("button", name="Change the key").click()
    assert sent.value.post_data_json == {"name": "renamed"}
    expect(page.locator("dd", has_text="renamed")).to_be_visible()
    page.get_by_label("usage:read").uncheck()
    page.get_by_label("Requests at a time").fill("3")
    loads: list[Route] = []
    page.route("**/console/keys/*", lambda load: loads.append(load))
    with page.expect_request("**/v1/keys/*") as sent, page.expect_request("**/console/keys/*"):
        page.get_by_role("button", name="Change the key").click()
    assert sent.value.post_data_json == {"max_concurrency": 3, "scopes": ["admin", "inference"]}
    # The page still loads after the change when the next key comes, which must not get lost.
    with page.expect_response("**/rotate"):
        page.get_by_role("button", name="Make the next key").click()
    loads.pop(0).continue_()
    page.unroute("**/console/keys/*")
    key = page.locator(".secret code").inner_text()
    assert demo_stack.client(key).get("/v1/limits").status_code == 200
    page.get_by_role("button", name="I have kept it").click()
    expect(page.locator("dt", has_text="ends (UTC)")).to_be_visible()


def test_a_limit_is_seen_to_be_used(page: Page, demo_stack: Stack, key: str) -> None:
    page.goto(f"{demo_stack.base_url}/console/keys")
    used = page.locator("#limits tr", has_text="6 requests per minute").locator("meter")
    expect(used).to_have_attribute("value", "0")
    assert ask(demo_stack, key).status_code == 200
    expect(used).to_have_attribute("value", "1")


def test_a_webhook_is_made_and_its_test_event_is_seen_to_arrive(
    page: Page, demo_stack: Stack, receiver: str
) -> None:
    page.goto(f"{demo_stack.base_url}/console/webhooks")
    page.get_by_label("Address").fill(receiver)
    page.get_by_role("button", name="Make the webhook").click()
    expect(page.locator(".secret code")).to_contain_text("whsec_")
    page.get_by_role("button", name="I have kept it").click()
    page.get_by_role("button", name="Send a test event").click()
    page.get_by_text("body", exact=True).click()
    event = page.locator("#deliveries tr", has_text="webhook.test")
    expect(event).to_contain_text("delivered")
    # What was opened stays open when the list is loaded again.
    expect(event.get_by_text('"type":"webhook.test"')).to_be_visible()
    page.get_by_role("button", name="Remove the webhook").click()
    expect(page.get_by_role("button", name="Make the webhook")).to_be_visible()


def test_the_browser_checks_a_statement(page: Page, demo_stack: Stack, tenant: Tenant) -> None:
    body, headers = {"amount_usd": "7", "memo": "déjà <payé>"}, {"idempotency-key": "one"}
    path = f"/admin/v1/tenants/{tenant.name}/payments"
    assert demo_stack.operator.post(path, json=body, headers=headers).status_code == 201
    month = month_of(now_ms())
    signer = Signer(bytes.fromhex(Secrets.load(demo_stack.data_dir).receipt_signing_key))
    with closing(Database(data_dir=demo_stack.data_dir, exclusive=False)) as database:
        issuing = Statements(database, signer, now_ms=lambda conn: end_of(month))
        issuing.issue(tenant.tenant_id, month)
    page.goto(f"{demo_stack.base_url}/console/bill")
    page.get_by_role("link", name=month).click()
    expect(page.get_by_role("status")).to_contain_text("Genuine")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as JSON").click()
    assert download.value.suggested_filename == f"statement-{month}.json"
    page.route("**/console/bill/*", _forge)
    page.reload()
    expect(page.get_by_role("status")).to_contain_text("Not genuine")


def _forge(route: Route) -> None:
    """Answer with a page whose statement has another amount."""
    found = route.fetch()
    route.fulfill(response=found, body=found.text().replace("7000000000", "9000000000"))


def test_an_export_is_scheduled_until_its_schedule_is_deleted(
    page: Page, demo_stack: Stack
) -> None:
    page.goto(f"{demo_stack.base_url}/console/bill")
    page.get_by_label("Format").last.select_option("focus")
    page.get_by_label("Every").select_option("day")
    page.get_by_role("button", name="Schedule").click()
    expect(page.locator("tr", has_text="/focus/")).to_contain_text("day")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No export is scheduled.")).to_be_visible()
