"""A browser that has signed in to the console of a stack."""

import re
from collections.abc import Iterator

from playwright.sync_api import Browser, Page

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
