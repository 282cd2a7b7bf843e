"""An operator's day in the console, without a mouse: an engine dies, and a balance is wrong."""

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.browser import chromium
from tests.e2e.console_browser import enter, press
from tests.e2e.stack import Stack, Tenant, running

PROMPT = {"model": "base", "prompt": [7, 8, 9], "max_tokens": 2}
QUIET = "Nothing that this gateway can see."


@pytest.fixture
def stack(tiny_model: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack with long answers, whose first tokens are never late."""
    with running(
        tmp_path / "stack", tiny_model, fake_engine=True, max_model_len=512,
        slo_first_token_s=60, environment={"FAKE_STEP_S": "0.1"},
    ) as stack:  # fmt: skip
        stack.tenant("initech")
        yield stack


@pytest.fixture
def page(stack: Stack) -> Iterator[Page]:
    """A page that asks nothing of other origins, in a browser that complains of nothing."""
    expect.set_options(timeout=60_000)
    complaints: list[str] = []
    ours = (f"{stack.base_url}/", "data:")
    with chromium() as browser:
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda it: it.url.startswith(ours) or complaints.append(it.url))
        page.on("dialog", lambda dialog: dialog.accept())
        yield page
    assert complaints == []


def test_an_operators_day(page: Page, stack: Stack) -> None:
    umbrella = stack.tenant("umbrella")
    page.goto(f"{stack.base_url}/console")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(stack.admin_key)
    page.keyboard.press("Enter")
    expect(part(page, "What is wrong now")).to_contain_text(QUIET)
    see_the_engine(page, num_deaths=0)
    assert umbrella.http.post("/v1/completions", json=PROMPT).status_code == 200
    kill_the_engine_under_a_request(page, stack, umbrella)
    see_the_engine(page, num_deaths=1)
    stack.settled_events(2)
    go(page, "Slow requests")
    failed = page.get_by_role("article").filter(has_text="failed engine_failure")
    expect(failed).to_contain_text("to the first token: umbrella")
    find_the_tenant(page)
    suspend_and_activate(page, umbrella)
    break_the_balance(stack, umbrella)
    acknowledge_the_difference(page, umbrella)
    find_in_the_log(page, "tenant.suspend", "umbrella")
    find_in_the_log(page, "audit.acknowledge", "a copy went wrong")
    press(page, page.get_by_role("button", name="Sign out"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    page.goto(f"{stack.base_url}/console/operator/tenants")
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


def go(page: Page, name: str) -> None:
    press(page, page.get_by_role("navigation").get_by_role("link", name=name, exact=True))
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


def part(page: Page, name: str) -> Locator:
    heading = page.get_by_role("heading", level=2, name=name, exact=True)
    return page.locator("section").filter(has=heading)


def see_the_engine(page: Page, num_deaths: int) -> None:
    name = part(page, "Base models").get_by_text("deaths of engines", exact=True)
    expect(name.locator("+ dd")).to_have_text(str(num_deaths))
    engine = part(page, "Engines").get_by_role("article")
    expect(engine.get_by_role("heading")).to_have_text("engine ready")
    arena = engine.get_by_role("img", name="Memory of engine: KV in use 0 of 2048 slabs")
    expect(arena.locator("rect")).not_to_have_count(0)
    expect(part(page, "Queue by tenant")).to_contain_text("Nobody has a request under way.")


def kill_the_engine_under_a_request(page: Page, stack: Stack, tenant: Tenant) -> None:
    body = PROMPT | {"max_tokens": 500, "ignore_eos": True, "stream": True}
    with tenant.http.stream("POST", "/v1/completions", json=body) as answer:
        expect(part(page, "Queue by tenant").get_by_role("link")).to_have_text(tenant.name)
        expect(page.locator("[data-figure=batch]")).to_have_text("1")
        stack.kill("engine")
        assert "Nothing was billed." in answer.read().decode()


def find_the_tenant(page: Page) -> None:
    go(page, "Tenants")
    enter(page, "Part of the name", "umb")
    expect(page.locator("#found tbody tr")).to_have_count(1)
    press(page, page.get_by_role("link", name="umbrella"))
    figures = page.locator(".figures div")
    for name, number in (("requests in 24 h", "2"), ("failed in 24 h", "1")):
        expect(figures.filter(has_text=name).locator("dd")).to_have_text(number)
    spent = figures.filter(has_text="spent this month").locator("dd").inner_text()
    assert spent > "$0.00"
    rows = part(page, "Last requests").get_by_role("row")
    for outcome, cost in (("served max_tokens", spent), ("failed engine_failure", "$0.00")):
        expect(rows.filter(has_text=outcome).get_by_role("cell").last).to_have_text(cost)


def suspend_and_activate(page: Page, tenant: Tenant) -> None:
    for button, state, status in (("Suspend", "suspended", 403), ("Activate", "active", 200)):
        press(page, page.get_by_role("button", name=button))
        expect(page.get_by_role("heading", level=1)).to_have_text(f"{tenant.name} {state}")
        assert tenant.http.get("/v1/models").status_code == status


def break_the_balance(stack: Stack, tenant: Tenant) -> None:
    """Change a balance behind the ledger's back; a gateway audits when it has started."""
    stack.stop()
    query = "UPDATE tenant_accounts SET balance_nanousd = balance_nanousd + 7 WHERE tenant_id = ?"
    with contextlib.closing(sqlite3.connect(stack.data_dir / "chorale.db")) as ledger, ledger:
        assert ledger.execute(query, (tenant.tenant_id,)).rowcount == 1
    stack.start(FAKE_STEP_S="0.1")


def acknowledge_the_difference(page: Page, tenant: Tenant) -> None:
    go(page, "Engines")
    expect(part(page, "What is wrong now")).to_contain_text("last audit found: 1. See Incidents")
    go(page, "Incidents")
    findings = part(page, "Findings of the audit")
    expect(findings).to_contain_text("A balance is not the sum of its entries. Change nothing")
    expect(findings.get_by_role("row").last).to_contain_text(f"tenant {tenant.tenant_id}")
    enter(page, "Reason", "a copy went wrong")
    expect(findings).to_contain_text("No difference")
    expect(part(page, "On record").get_by_role("row").last).to_contain_text("audit_accounts")
    go(page, "Engines")
    expect(part(page, "What is wrong now")).to_contain_text(QUIET)


def find_in_the_log(page: Page, action: str, text: str) -> None:
    go(page, "Audit log")
    enter(page, "Action", action)
    line = re.compile(f"operator{action}.*{text}", re.DOTALL)
    expect(page.locator("#found tbody tr")).to_have_text([line])
