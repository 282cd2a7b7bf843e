"""A tenant's day in the console: from an adapter's two files to its first line in the bill."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from server.accounts.auth import SCOPES
from tests.e2e.conftest import DEMO
from tests.e2e.console_browser import drop
from tests.e2e.stack import Stack, Tenant

QUESTION = "Tell me about Japan."


@pytest.fixture(scope="module")
def tenant(demo_stack: Stack) -> Tenant:
    """A tenant of this test alone, since others count what the demo's tenants have."""
    tenant = demo_stack.tenant("umbrella")
    demo_stack.tenants.remove(tenant)
    return tenant


@pytest.fixture(scope="module")
def key(tenant: Tenant) -> str:
    body = {"name": "of the owner", "scopes": sorted(SCOPES)}
    made = tenant.stack.operator.post(f"/admin/v1/tenants/{tenant.name}/keys", json=body)
    return made.json()["api_key"]


def go(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


def test_a_tenants_day(page: Page, demo_stack: Stack, tenant: Tenant) -> None:
    page.goto(f"{demo_stack.base_url}/console")
    upload_by_dropping(page)
    said = ask_in_the_playground(page)
    assert said == through_the_api(tenant)
    demo_stack.wait(lambda: len(requests_in_the_bill(page)) == 2)
    find_the_request_and_its_receipt(page)
    go(page, "Spend")
    row = page.get_by_role("table", name="By model").get_by_role("row", name="json")
    expect(row.get_by_role("cell").nth(1)).to_have_text("2")
    key = make_a_key(page)
    assert demo_stack.client(key).get("/v1/models").status_code == 200
    revoke_the_key(page)
    demo_stack.wait(lambda: demo_stack.client(key).get("/v1/models").status_code == 401)
    assert [line["model"] for line in export(page)] == ["json", "json"]


def upload_by_dropping(page: Page) -> None:
    go(page, "Adapters")
    # The form is open where there is no adapter yet.
    drop(page, [DEMO / "adapters" / "json"])
    page.locator("#upload").get_by_label("Name", exact=True).fill("json")
    page.get_by_role("button", name="Upload").click()
    said = page.locator("#upload [role=status]")
    expect(said).to_contain_text("json@1 is ready")
    page.get_by_role("link", name="See its passport").click()
    expect(page.locator("dd", has_text="passed")).to_be_visible()


def ask_in_the_playground(page: Page) -> str:
    """The answer of the adapter."""
    go(page, "Playground")
    column = page.locator(".column").filter(
        has=page.get_by_role("heading", name="json", exact=True)
    )
    page.locator(".column").first.get_by_role("button", name="Remove").click()
    expect(page.locator(".column")).to_have_count(1)
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(column.locator(".turn[aria-busy=false]")).to_have_count(1)
    return column.locator("[data-field=content]").text_content() or ""


def through_the_api(tenant: Tenant) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "json", "messages": messages, "temperature": 0}
    answer = tenant.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def requests_in_the_bill(page: Page) -> list[str]:
    """The texts of the rows of requests, the newest first."""
    go(page, "Requests")
    return page.locator("#found tbody tr").filter(has_text="json").all_text_contents()


def find_the_request_and_its_receipt(page: Page) -> None:
    page.locator("#found tbody tr").last.get_by_role("link").first.click()
    expect(page.locator(".waterfall svg")).not_to_have_count(0)
    expect(page.locator("[data-verdict]")).to_have_attribute("data-genuine", "true")


def make_a_key(page: Page) -> str:
    go(page, "Keys and limits")
    page.get_by_label("Name").fill("made today")
    page.get_by_role("button", name="Make the key").click()
    key = page.locator(".secret code").inner_text()
    page.get_by_role("button", name="I have kept it").click()
    return key


def revoke_the_key(page: Page) -> None:
    page.get_by_role("row", name="made today").get_by_role("link").first.click()
    page.get_by_role("button", name="Revoke this key").click()
    expect(page.get_by_role("row", name=re.compile("made today"))).to_contain_text("revoked")


def export(page: Page) -> list[dict]:
    """The lines of the export of requests."""
    go(page, "Bill")
    page.get_by_label("Format").first.select_option("jsonl")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    lines = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    return [line for line in lines if line["kind"] == "usage"]
