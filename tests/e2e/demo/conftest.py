"""The demo's model and adapters on one stack, and one browser, which the files here share."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.e2e.browser import chromium
from tests.e2e.conftest import DEMO
from tests.e2e.console_browser import sign_in
from tests.e2e.stack import Stack, Tenant, running

HERE = Path(__file__).parent
WAIT_MS = 60_000
_ends = contextlib.ExitStack()


@functools.cache
def _browser() -> Browser:
    expect.set_options(timeout=WAIT_MS)
    return _ends.enter_context(chromium())


@functools.cache
def _stack(parent: Path) -> Stack:
    rules = {"webhook_allow_http": True, "webhook_allow_private": True}
    folder = Path(tempfile.mkdtemp(prefix="demo-stack", dir=parent))
    stack = _ends.enter_context(running(folder, DEMO / "model", **rules))
    for name, adapters in {"acme": ("json", "shout"), "globex": ("python", "pirate")}.items():
        tenant = stack.tenant(name)
        for adapter in adapters:
            tenant.push(adapter, DEMO / "adapters" / adapter)
    return stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """End stack and browser with the last test here: others run event loops in this thread."""
    yield
    if nextitem is None or nextitem.path.parent != HERE:
        _ends.close()
        _browser.cache_clear()
        _stack.cache_clear()


@pytest.fixture(scope="module")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Serve the demo's model and adapters, for two tenants as in `chorale demo`."""
    return _stack(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def tenant(demo_stack: Stack) -> Tenant:
    """The demo's first tenant, where a module has none of its own."""
    return demo_stack.tenants[0]


@pytest.fixture
def client(tenant: Tenant) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the tenant's key."""
    url = f"{tenant.stack.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key=tenant.api_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def agent(tenant: Tenant) -> Iterator[None]:
    """Serve the adapter that calls a tool; tests of pages count the others."""
    tenant.push("agent", DEMO / "adapters" / "agent")
    yield
    tenant.adapters.remove("agent")
    tenant.http.delete("/v1/adapters/agent").raise_for_status()


@pytest.fixture(scope="module")
def browser() -> Browser:
    return _browser()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A context for a module: one for each test would take longer than most tests."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context
    context.close()


@pytest.fixture
def visitor(context: BrowserContext) -> Iterator[Page]:
    """A page whose scripts do not fail."""
    page, faults = context.new_page(), []
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    page.close()
    assert faults == []


@pytest.fixture(scope="module")
def key(tenant: Tenant) -> str:
    """The key that a module signs in with, where it has none of its own."""
    return tenant.api_key


@pytest.fixture(scope="module")
def session(context: BrowserContext, demo_stack: Stack, key: str) -> None:
    page = context.new_page()
    sign_in(page, demo_stack, key)
    page.close()


@pytest.fixture
def page(session: None, visitor: Page) -> Page:
    """A page of the console's, signed in and empty, whose questions are answered with yes."""
    visitor.on("dialog", lambda dialog: dialog.accept())
    return visitor
