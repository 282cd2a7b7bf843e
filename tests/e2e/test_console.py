"""The console in a real browser, against the demo: all pages of a tenant and of the operator."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.e2e.browser import browser  # noqa: F401
from tests.e2e.stack import Stack

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
TENANT_PAGES = ["", "/requests", "/adapters", "/adapters/json", "/keys", "/bill", "/playground"]
OPERATOR_PAGES = [
    f"/operator{path}"
    for path in ("", "/tenants", "/tenants/acme", "/requests", "/incidents", "/audit")
]
MODES = [(1280, "light"), (400, "dark")]


@pytest.fixture(scope="module")
def asked(demo_stack: Stack) -> Stack:
    """The demo after a request to an adapter and one to the base model, which are in the bill."""
    acme = demo_stack.tenants[0]
    for model in ("json", demo_stack.model):
        body = {"model": model, "prompt": "Tell me about Japan.", "max_tokens": 20}
        answer = acme.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        receipt = f"/v1/receipts/{answer.json()['id']}"
        demo_stack.wait(lambda url=receipt: acme.http.get(url).status_code == 200)
    return demo_stack


def sign_in(page: Page, stack: Stack, key: str, path: str = "") -> None:
    page.goto(f"{stack.base_url}/console{path}")
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def new_context(chromium: Browser, width: int, scheme: str) -> BrowserContext:
    size = {"width": width, "height": 900}
    return chromium.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:  # noqa: F811
    context = new_context(browser, *MODES[0])
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, asked: Stack) -> Page:
    """A page of acme's."""
    page = context.new_page()
    sign_in(page, asked, asked.tenants[0].api_key)
    return page


@pytest.mark.parametrize(("width", "scheme"), MODES)
@pytest.mark.parametrize("who", ["tenant", "operator"])
def test_every_page_is_for_everybody_and_asks_nothing_of_others(
    browser: Browser,  # noqa: F811
    asked: Stack,
    who: str,
    width: int,
    scheme: str,
) -> None:
    """axe finds nothing, no width needs sideways scrolling, and the browser's console stays clean:
    the policy of contents forbids nothing that a page does."""
    context = new_context(browser, width, scheme)
    page, complaints, urls = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    key = asked.tenants[0].api_key if who == "tenant" else asked.admin_key
    sign_in(page, asked, key)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    faults = []
    for path in TENANT_PAGES if who == "tenant" else OPERATOR_PAGES:
        page.goto(f"{asked.base_url}/console{path}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        found = Axe().run(page).response["violations"]
        faults += [(path, it["id"], it["nodes"][0]["html"]) for it in found]
        if (needed := page.evaluate("document.documentElement.scrollWidth")) != width:
            faults.append((path, "needs a width of", needed))
        name = path.strip("/").replace("/", "-") or "spend"
        page.screenshot(path=SCREENSHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
    assert faults == []
    assert complaints == []
    assert all(url.startswith((f"{asked.base_url}/", "data:", "blob:")) for url in urls)
    assert all(key not in url for url in urls)
    context.close()


def test_the_page_for_signing_in_is_for_everybody(context: BrowserContext, asked: Stack) -> None:
    page = context.new_page()
    page.goto(f"{asked.base_url}/console")
    assert Axe().run(page).violations_count == 0
    page.get_by_label("API key").fill("sk-chorale-nobodys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("Incorrect API key provided.")


def test_no_script_can_read_the_session_and_the_key_is_kept_nowhere(
    page: Page, context: BrowserContext, asked: Stack
) -> None:
    key = asked.tenants[0].api_key
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    assert key not in page.evaluate("JSON.stringify(sessionStorage)")
    (cookie,) = context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (
        "chorale_session", True, "Strict",
    )  # fmt: skip
    assert key not in cookie["value"]
    assert key not in page.content()


def test_the_spend_of_the_requests_is_drawn_and_a_filter_goes_into_the_url(
    page: Page, asked: Stack
) -> None:
    expect(page.locator(".plot canvas")).to_be_visible()
    before = page.locator(".figures dd").first.text_content()
    page.get_by_role("combobox", name="Model", exact=True).fill("json")
    page.get_by_role("combobox", name="Model", exact=True).press("Enter")
    page.wait_for_url(re.compile("model=json"))
    rows = page.get_by_role("table", name="By model").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(page.locator(".plot canvas")).to_be_visible()
    assert page.locator(".figures dd").first.text_content() != before
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Spend")
    expect(page.locator(".figures dd").first).to_have_text(before or "")


def test_figures_of_an_earlier_filter_do_not_stay_beside_one_that_is_refused(page: Page) -> None:
    page.get_by_label("To", exact=True).fill("2026-01-01")
    expect(page.get_by_role("alert")).to_contain_text("start must be at most 366 days before end")
    expect(page.locator(".figures")).to_have_count(0)
    page.get_by_label("From", exact=True).fill("2026-01-01")
    expect(page.locator(".figures")).to_be_visible()


def test_what_is_shown_can_be_had_as_csv(page: Page) -> None:
    with page.expect_download() as downloading:
        page.get_by_role("link", name="CSV of what is shown").click()
    text = Path(downloading.value.path()).read_text()
    assert text.startswith("day,model,num_requests,")
    assert "json" in text


def open_request(page: Page, asked: Stack) -> None:
    page.goto(f"{asked.base_url}/console/requests?model=json")
    page.locator("#found tbody a").first.click()


def test_a_request_has_its_waterfall_and_a_receipt_that_the_browser_checked(
    page: Page, asked: Stack
) -> None:
    open_request(page, asked)
    expect(page.locator(".waterfall svg")).not_to_have_count(0)
    expect(page.locator("[data-verdict]")).to_have_attribute("data-genuine", "true")
    page.get_by_text("The receipt as it was signed").click()
    expect(page.locator("[data-fields]")).to_contain_text("receipt_seq")


@pytest.mark.parametrize("field", ["amount_nanousd", "sha256", "signature"])
def test_a_receipt_that_was_changed_is_not_genuine(page: Page, asked: Stack, field: str) -> None:
    def change(route) -> None:
        answer = route.fetch()
        body = answer.json()
        value = body["receipt"][field]
        changed = value + 1 if isinstance(value, int) else "A" + value[1:]
        body["receipt"][field] = changed if changed != value else "B" + value[1:]
        route.fulfill(response=answer, json=body)

    page.route(re.compile(r"/v1/receipts/[0-9a-f]{8}"), change)
    open_request(page, asked)
    expect(page.locator("[data-verdict]")).to_have_attribute("data-genuine", "false")


def test_all_pages_can_be_reached_by_the_keyboard_alone(page: Page, asked: Stack) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    for name in ("Chorale", "Spend", "Requests"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests")


def test_after_signing_out_the_back_button_shows_nothing(page: Page, asked: Stack) -> None:
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    page.go_back()
    page.wait_for_load_state()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
