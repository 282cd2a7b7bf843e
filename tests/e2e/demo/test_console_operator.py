"""The operator's pages in a real browser, against the demo's model and adapters."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.stack import Stack

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
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


def test_a_tenant_its_key_its_price_and_its_payment_are_made_on_the_pages(
    page: Page, demo_stack: Stack
) -> None:
    page.goto(f"{demo_stack.base_url}{HOME}/tenants")
    page.get_by_text("Make a tenant").click()
    page.get_by_label("Name", exact=True).fill("made-on-a-page")
    page.get_by_role("button", name="Make the tenant").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("made-on-a-page active")
    page.get_by_text("Make a key").click()
    page.get_by_label("Name").fill("the first")
    page.get_by_role("button", name="Make the key").click()
    key = page.locator(".secret code").inner_text()
    expect(page.get_by_role("row", name="the first")).to_contain_text("valid")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.screenshot(path=SCREENSHOTS / "operator-new-key-1280-light.png", full_page=True)
    page.get_by_role("button", name="I have kept it").click()
    page.get_by_label("Dollars paid").fill("12.5")
    page.get_by_role("button", name="Record the payment").click()
    expect(page.locator(".figures div").first).to_contain_text("$12.50")
    page.get_by_role("link", name="Its own prices").click()
    page.get_by_label("Nano-dollars a prompt token").fill("0")
    page.get_by_role("button", name="Add the price").click()
    expect(page.get_by_role("row", name="in effect")).to_contain_text("$0.00")
    body = {"model": "base", "prompt": "Hello", "max_tokens": 1}
    answer = demo_stack.client(key).post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
