"""The operator's pages in a real browser, against the demo's model and adapters."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import browser  # noqa: F401
from tests.e2e.console_browser import signed_in
from tests.e2e.stack import Stack, Tenant

HOME = "/console/operator"


@pytest.fixture
def page(browser: Browser, demo_stack: Stack) -> Iterator[Page]:  # noqa: F811
    faults: list[str] = []
    for page in signed_in(browser, demo_stack, demo_stack.admin_key):
        page.on("pageerror", lambda error: faults.append(str(error)))
        yield page
    assert faults == []


def other_tenant(stack: Stack, name: str) -> Tenant:
    """A tenant that is not among those of the demo, which other tests count."""
    tenant = stack.tenant(name)
    stack.tenants.remove(tenant)
    return tenant


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


def test_limits_and_a_budget_are_set_and_an_impossible_one_is_explained(
    page: Page, demo_stack: Stack
) -> None:
    tenant = other_tenant(demo_stack, "limited-soon")
    page.goto(f"{demo_stack.base_url}{HOME}/tenants/{tenant.name}")
    page.get_by_label("Requests per minute").fill("7")
    page.get_by_label("Weight").fill("2.5")
    page.get_by_role("button", name="Set limits").click()
    # The server writes the attribute, so the page is loaded again by then.
    expect(page.get_by_label("Weight")).to_have_attribute("value", "2.5")
    page.get_by_label("Plan").fill("No Plan")
    page.get_by_role("button", name="Set limits").click()
    expect(page.get_by_role("alert")).to_contain_text("A plan's name matches")
    page.get_by_role("textbox", name="Dollars").fill("12.5")
    page.get_by_role("button", name="Set budget").click()
    budgets = page.locator("section").filter(has=page.get_by_role("heading", name="Budgets"))
    expect(budgets).to_contain_text("$12.50 left of $12.50")
    operator = demo_stack.client(demo_stack.admin_key)
    found = operator.get(f"/admin/v1/tenants/{tenant.name}").json()
    assert (found["requests_per_minute"], found["weight"]) == (7, 2.5)
    assert (found["tokens_per_minute"], found["plan"]) == (None, "standard")
    assert found["monthly_budget"] == "12.500000000"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(page: Page, demo_stack: Stack, colours: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme=colours)
    for path in ("", "/tenants", "/tenants/acme", "/requests", "/incidents", "/audit"):
        page.goto(demo_stack.base_url + HOME + path)
        expect(page.locator("h1")).to_be_visible()
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, path
