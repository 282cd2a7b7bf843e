"""The operator's pages in a real browser, against the demo's model and adapters."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.stack import Stack

HOME = "/console/operator"


@pytest.fixture(scope="module")
def key(demo_stack: Stack) -> str:
    return demo_stack.admin_key


def test_the_parts_of_the_arena_are_drawn_in_colours_of_their_own(
    page: Page, demo_stack: Stack
) -> None:
    page.goto(demo_stack.base_url + HOME)
    picture = page.locator("svg.arena")
    expect(picture).to_have_attribute("aria-label", re.compile(r"KV in use \d+ of \d+ slabs"))
    parts = picture.locator("rect")
    widths = [float(part.get_attribute("width")) for part in parts.all()]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    fills = parts.evaluate_all("all => all.map(it => getComputedStyle(it).fill)")
    assert len(set(fills)) == len(fills) >= 2


def test_limits_and_a_budget_are_set_and_what_is_not_changed_is_kept(
    page: Page, demo_stack: Stack
) -> None:
    tenant = demo_stack.tenant("limited-soon")
    demo_stack.tenants.remove(tenant)
    page.goto(f"{demo_stack.base_url}{HOME}/tenants/{tenant.name}")
    page.get_by_label("Requests per minute").fill("7")
    page.get_by_label("Weight").fill("2.5")
    page.get_by_role("button", name="Set limits").click()
    # The server writes the attribute, so the page is loaded again by then.
    expect(page.get_by_label("Weight")).to_have_attribute("value", "2.5")
    page.get_by_role("textbox", name="Dollars").fill("12.5")
    page.get_by_role("button", name="Set budget").click()
    budgets = page.locator("section").filter(has=page.get_by_role("heading", name="Budgets"))
    expect(budgets).to_contain_text("$12.50 left of $12.50")
    operator = demo_stack.client(demo_stack.admin_key)
    found = operator.get(f"/admin/v1/tenants/{tenant.name}").json()
    assert (found["requests_per_minute"], found["weight"]) == (7, 2.5)
    assert (found["tokens_per_minute"], found["plan"]) == (None, "standard")
    assert found["monthly_budget"] == "12.500000000"
