"""A browser at the console of a stack: signing in, and the keyboard."""

import re
from collections.abc import Iterator

from playwright.sync_api import Browser, Locator, Page

from tests.e2e.stack import Stack


def signed_in(browser: Browser, stack: Stack, key: str) -> Iterator[Page]:
    """A page of a new browser context, whose first page has loaded; the context ends with it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{stack.base_url}/console/sign-in")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(re.compile("/console(?!/sign-in)"))
    yield page
    context.close()


def tab_to(page: Page, wanted: Locator) -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError("the Tab key does not reach it")


def press(page: Page, wanted: Locator) -> None:
    tab_to(page, wanted)
    page.keyboard.press("Enter")


def enter(page: Page, field: str, text: str) -> None:
    """Type a text into the field with a label, and press Enter."""
    tab_to(page, page.get_by_label(field))
    page.keyboard.type(text)
    page.keyboard.press("Enter")
