"""The console in a real browser: all its pages, signing in, spend and receipts."""

import contextlib
import functools
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from server.accounts.auth import SCOPES
from tests.e2e.console_browser import sign_in
from tests.e2e.stack import Stack

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
TENANT_PAGES = [
    "", "/requests", "/adapters", "/adapters/json", "/offers", "/keys", "/bill", "/webhooks",
    "/playground",
]  # fmt: skip
OPERATOR_PAGES = [
    f"/operator{path}"
    for path in ("", "/tenants", "/tenants/acme", "/prices", "/requests", "/incidents", "/audit")
]
PHONE = 390
WIDTH = "document.documentElement.scrollWidth"
RECEIPT = re.compile(r"/v1/receipts/[0-9a-f]{8}")
MODES = [(1280, "light"), pytest.param(PHONE, "dark", marks=pytest.mark.soak)]


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


def key_of_the_owner(stack: Stack) -> str:
    """A key of acme's that sees every form."""
    body = {"name": "of the owner", "scopes": sorted(SCOPES)}
    return str(stack.operator.post("/admin/v1/tenants/acme/keys", json=body).json()["api_key"])


def _is_as_wide_as(page: Page, width: int) -> bool:
    return bool(page.evaluate(WIDTH) == width)


@pytest.mark.parametrize(("width", "scheme"), MODES)
@pytest.mark.parametrize("who", ["tenant", "operator"])
def test_every_page_is_for_everybody_and_asks_nothing_of_others(
    browser: Browser, asked: Stack, who: str, width: int, scheme: str
) -> None:
    """axe finds nothing, no width needs sideways scrolling, and the browser's console stays clean:
    the policy of contents forbids nothing that a page does."""
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page, complaints, urls = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    key = key_of_the_owner(asked) if who == "tenant" else asked.admin_key
    sign_in(page, asked, key)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    faults = []
    for path in TENANT_PAGES if who == "tenant" else OPERATOR_PAGES:
        page.goto(f"{asked.base_url}/console{path}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        found = Axe().run(page).response["violations"]
        faults += [(path, it["id"], it["nodes"][0]["html"]) for it in found]
        name = path.strip("/").replace("/", "-") or "spend"
        page.screenshot(path=SCREENSHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
        for narrow in (width, PHONE):
            page.set_viewport_size({"width": narrow, "height": 900})
            # What scripts have drawn follows the new width a moment later.
            with contextlib.suppress(AssertionError):
                asked.wait(functools.partial(_is_as_wide_as, page, narrow), timeout_s=20.0)
            if (needed := page.evaluate(WIDTH)) != narrow:
                faults.append((path, f"at {narrow} needs a width of", needed))
        page.set_viewport_size({"width": width, "height": 900})
    context.close()
    assert faults == []
    assert complaints == []
    assert all(url.startswith((f"{asked.base_url}/", "data:", "blob:")) for url in urls)
    assert all(key not in url for url in urls)


def test_signing_in_and_out_is_for_everybody(browser: Browser, asked: Stack) -> None:
    """A wrong key is said to be one, the keyboard reaches all pages, and going back shows none."""
    page = browser.new_page()
    page.goto(f"{asked.base_url}/console")
    assert Axe().run(page).violations_count == 0
    page.get_by_label("API key").fill("sk-chorale-nobodys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("Incorrect API key provided.")
    page.get_by_label("API key").fill(asked.tenants[0].api_key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    for name in ("Chorale", "Spend", "Requests"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text("Requests")
    page.get_by_role("button", name="Sign out").click()
    expect(heading).to_have_text("Sign in")
    page.go_back()
    page.wait_for_load_state()
    expect(heading).to_have_text("Sign in")
    page.close()


def test_a_phone_shows_what_a_request_cost_and_two_lines_of_navigation(
    browser: Browser, asked: Stack
) -> None:
    page = browser.new_page(viewport={"width": PHONE, "height": 900})
    sign_in(page, asked, key_of_the_owner(asked))
    tops = "all => new Set(all.map(it => it.getBoundingClientRect().top)).size"
    assert page.get_by_role("navigation").get_by_role("link").evaluate_all(tops) <= 2
    for path in ("", "/requests"):
        page.goto(f"{asked.base_url}/console{path}")
        cost = page.locator("#found table.cost").get_by_role("cell").filter(has_text="$").first
        box = cost.bounding_box()
        assert box is not None
        assert 0 < box["x"] < box["x"] + box["width"] <= PHONE
    page.close()


def test_no_script_can_read_the_session_and_the_key_is_kept_nowhere(
    page: Page, context: BrowserContext, asked: Stack
) -> None:
    page.goto(f"{asked.base_url}/console")
    key = asked.tenants[0].api_key
    assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    assert key not in page.evaluate("JSON.stringify(sessionStorage)")
    (cookie,) = context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (
        "chorale_session", True, "Strict",
    )  # fmt: skip
    assert key not in cookie["value"]
    assert key not in page.content()


def test_the_axes_are_of_the_days_and_amounts_that_are_drawn(page: Page, asked: Stack) -> None:
    page.add_init_script(
        """window.written = [];
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
          written.push(text);
          return write.call(this, text, ...place);
        };"""
    )
    page.goto(f"{asked.base_url}/console?plot=tokens")
    page.get_by_role("link", name="Today", exact=True).click()
    day = page.get_by_label("From", exact=True).input_value()
    expect(page.get_by_label("To", exact=True)).to_have_value(day)
    asked.wait(lambda: day in page.evaluate("written"))
    assert {it for it in page.evaluate("written") if "-" in it} == {day}
    page.screenshot(path=SCREENSHOTS / "spend-one-day-1280-light.png", full_page=True)
    # Of what is below zero, as after a correction, the same script draws an axis as well.
    below = {"x": [0, 86400], "unit": "$", "series": [{"label": "a", "values": [3, -2], "hue": 9}]}
    page.evaluate(
        """told => {
          const plot = Object.assign(document.createElement("div"), { className: "plot" });
          plot.dataset.plot = JSON.stringify(told);
          document.getElementById("main").append(plot);
          document.dispatchEvent(new Event("htmx:afterSettle"));
        }""",
        below,
    )
    asked.wait(lambda: {"-$2", "$0", "1970-01-02"} <= set(page.evaluate("written")))
    page.goto(f"{asked.base_url}/console?start=2026-02-02&end=2026-02-01&model=json")
    expect(page.get_by_role("alert")).to_contain_text("start must be at most 366 days before end")
    page.screenshot(path=SCREENSHOTS / "spend-bad-range-1280-light.png", full_page=True)
    page.get_by_label("To", exact=True).fill("2026-02-03")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("json")


def test_spend_is_drawn_and_a_filter_goes_into_the_url(page: Page, asked: Stack) -> None:
    page.goto(f"{asked.base_url}/console")
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
    # Figures of an earlier filter do not stay beside one that is refused.
    page.get_by_label("To", exact=True).fill("2026-01-01")
    expect(page.get_by_role("alert")).to_contain_text("start must be at most 366 days before end")
    expect(page.locator(".figures")).to_have_count(0)
    page.get_by_label("From", exact=True).fill("2026-01-01")
    expect(page.locator(".figures")).to_be_visible()


def test_a_receipt_is_checked_by_the_browser_which_finds_what_was_changed(
    page: Page, asked: Stack
) -> None:
    page.goto(f"{asked.base_url}/console/requests?model=json")
    page.locator("#found tbody a").first.click()
    expect(page.locator(".waterfall svg")).not_to_have_count(0)
    expect(page.locator("[data-verdict]")).to_have_attribute("data-genuine", "true")
    page.get_by_text("The receipt as it was signed").click()
    expect(page.locator("[data-fields]")).to_contain_text("receipt_seq")

    def change(route: Route, field: str) -> None:
        answer = route.fetch()
        body = answer.json()
        value = body["receipt"][field]
        changed = value + 1 if isinstance(value, int) else "A" + value[1:]
        body["receipt"][field] = changed if changed != value else "B" + value[1:]
        route.fulfill(response=answer, json=body)

    for field in ("amount_nanousd", "sha256", "signature"):
        page.route(RECEIPT, functools.partial(change, field=field))
        page.reload()
        expect(page.locator("[data-verdict]")).to_have_attribute("data-genuine", "false")
