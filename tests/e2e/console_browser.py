"""A browser at the console of a stack: signing in, the keyboard, and files that are dropped."""

import re
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Locator, Page

from tests.e2e.stack import Stack


def sign_in(page: Page, stack: Stack, key: str) -> None:
    """Sign in and wait for the first page."""
    page.goto(f"{stack.base_url}/console/sign-in")
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/console(?!/sign-in)"))


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


def drop(page: Page, paths: Sequence[Path]) -> None:
    """Drop files or folders on the form for uploads, which is open."""
    box = page.locator("#upload").bounding_box()
    assert box is not None
    place = {"x": box["x"] + box["width"] - 5, "y": box["y"] + 5}
    data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
    hand = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        hand.send("Input.dispatchDragEvent", {"type": kind, "data": data, **place})
