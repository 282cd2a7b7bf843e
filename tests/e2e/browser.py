"""A real browser for the tests of pages."""

import contextlib
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

from tests import needs

# A later list of features takes the place of Playwright's. Its last two are pages behind the
# address bar, which cost each context a process of its own.
_FEATURES = (
    "DestroyProfileOnBrowserClose,HttpsUpgrades,MediaRouter,OptimizationHints,PaintHolding,"
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup"
)
_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    f"--disable-features={_FEATURES}",
]  # fmt: skip


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser. Until it ends, its thread can run no event loop of its own."""
    path = needs.browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()
