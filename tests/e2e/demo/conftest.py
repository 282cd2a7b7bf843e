"""The demo's model and adapters on one stack, and one browser, which the files here share."""

from collections.abc import Iterator

import openai
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.e2e.browser import chromium
from tests.e2e.conftest import DEMO
from tests.e2e.console_browser import sign_in
from tests.e2e.folder_fixture import folder_fixture
from tests.e2e.stack import Stack, Tenant, running

WAIT_MS = 60_000


@folder_fixture
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve the demo's model and adapters, for two tenants as in `chorale demo`."""
    rules = {"webhook_allow_http": True, "webhook_allow_private": True}
    with running(tmp_path_factory.mktemp("demo-stack"), DEMO / "model", **rules) as stack:
        for name, adapters in {"acme": ("json", "shout"), "globex": ("python", "pirate")}.items():
            tenant = stack.tenant(name)
            for adapter in adapters:
                tenant.push(adapter, DEMO / "adapters" / adapter)
        yield stack


@folder_fixture
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tenant(demo_stack: Stack, request: pytest.FixtureRequest) -> Tenant:
    """The demo's first tenant; where a module names a TENANT, one of its tests alone, since others
    count what the demo's tenants have.
    """
    if not hasattr(request.module, "TENANT"):
        return demo_stack.tenants[0]
    tenant = demo_stack.tenant(request.module.TENANT)
    demo_stack.tenants.remove(tenant)
    return tenant


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
