"""The console's pages of adapters in a real browser: uploads, and changes by forms."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from safetensors.numpy import load_file, save_file

from tests.e2e.browser import browser  # noqa: F401
from tests.e2e.conftest import DEMO
from tests.e2e.console_browser import signed_in, tab_to
from tests.e2e.cutting_relay import CuttingRelay
from tests.e2e.stack import FILES, Stack, Tenant

READY_MS = 60_000
PART_BYTES = 16 << 20


@pytest.fixture(scope="module")
def initech(demo_stack: Stack) -> Tenant:
    """A tenant of these tests alone, since others count what the demo's tenants have."""
    tenant = demo_stack.tenant("initech")
    demo_stack.tenants.remove(tenant)
    return tenant


@pytest.fixture
def page(browser: Browser, demo_stack: Stack, initech: Tenant) -> Iterator[Page]:  # noqa: F811
    faults: list[str] = []
    for page in signed_in(browser, demo_stack, initech.api_key):
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        page.set_default_timeout(READY_MS)
        expect.set_options(timeout=READY_MS)
        yield page
        assert faults == []


def paths_of(adapter: str) -> list[Path]:
    return [DEMO / "adapters" / adapter / file for file in FILES]


def open_form(page: Page, base_url: str) -> None:
    page.goto(f"{base_url}/console/adapters")
    page.locator("#uploading").evaluate("details => { details.open = true }")


def upload(page: Page, base_url: str, name: str, adapter: str) -> None:
    upload_files(page, base_url, name, paths_of(adapter))


def upload_files(page: Page, base_url: str, name: str, paths: list[Path]) -> None:
    open_form(page, base_url)
    page.locator("#upload [type=file]").set_input_files(paths)
    page.locator("#upload").get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Upload").click()


def expect_ready(page: Page, name: str, version: int = 1) -> None:
    expect(page.locator("#upload [role=status]")).to_contain_text(f"{name}@{version} is ready")


@pytest.fixture
def relay(demo_stack: Stack) -> Iterator[tuple[CuttingRelay, str]]:
    """A relay before the gateway, and its URL."""
    relay = CuttingRelay(demo_stack.port)
    with relay.running() as url:
        yield relay, url


def test_an_upload_by_the_chooser_becomes_ready_and_shows_its_passport(
    page: Page, demo_stack: Stack, initech: Tenant
) -> None:
    upload(page, demo_stack.base_url, "chosen", "json")
    expect_ready(page, "chosen")
    size_bytes = sum(path.stat().st_size for path in paths_of("json"))
    assert page.locator("progress").evaluate("bar => [bar.value, bar.max]") == [size_bytes] * 2
    expect(page.get_by_role("link", name="chosen", exact=True)).to_be_visible()
    page.get_by_role("link", name="See its passport").click()
    digest = initech.http.get("/v1/adapters/chosen").json()["latest"]["digest"]
    expect(page.get_by_text(digest)).to_be_visible()
    expect(page.locator("dd", has_text="passed")).to_be_visible()
    expect(page.locator("#where")).to_contain_text("device")
    page.goto(f"{demo_stack.base_url}/console/adapters?search=chos")
    expect(page.locator("#found tbody tr")).to_contain_text("chosen")


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_dropped_is_uploaded(page: Page, demo_stack: Stack, is_folder: bool) -> None:
    open_form(page, demo_stack.base_url)
    paths = [paths_of("shout")[0].parent] if is_folder else [*paths_of("shout"), Path(__file__)]
    box = page.locator("#upload").bounding_box()
    assert box is not None
    place = {"x": box["x"] + box["width"] - 5, "y": box["y"] + 5}
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    hand = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        hand.send("Input.dispatchDragEvent", {"type": kind, "data": data, **place})
    files = page.locator("#upload [type=file]")
    demo_stack.wait(lambda: files.evaluate("input => input.files.length") == 2)
    page.locator("#upload").get_by_label("Name", exact=True).fill(f"dropped-{is_folder}".lower())
    page.get_by_role("button", name="Upload").click()
    expect_ready(page, f"dropped-{is_folder}".lower())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo's adapter `json` with zeros up to rank 256 in every module: two parts of weights."""
    folder, rank = tmp_path_factory.mktemp("large"), 256
    config_path, weights_path = paths_of("json")
    config, tensors = json.loads(config_path.read_text()), {}
    for name, tensor in load_file(weights_path).items():
        places = [(0, rank - tensor.shape[0]), (0, 0)]
        places = places if "lora_A" in name else [(0, 0), (0, rank - tensor.shape[1])]
        tensors[name] = np.pad(tensor.astype(np.float32), places)
    at, (vocab, hidden) = "base_model.model.", (2048, 128)
    for name, shape in {
        "model.embed_tokens.lora_embedding_A": (rank, vocab),
        "model.embed_tokens.lora_embedding_B": (hidden, rank),
        "lm_head.lora_A.weight": (rank, hidden),
        "lm_head.lora_B.weight": (vocab, rank),
    }.items():
        tensors[at + name] = np.zeros(shape, np.float32)
    config["lora_alpha"] *= rank // config["r"]
    config["r"] = rank
    config["target_modules"] += ["embed_tokens", "lm_head"]
    (folder / FILES[0]).write_text(json.dumps(config))
    save_file(tensors, folder / FILES[1])
    paths = [folder / file for file in FILES]
    assert PART_BYTES < paths[1].stat().st_size < 2 * PART_BYTES
    return paths


def test_a_cut_connection_in_the_middle_is_resumed(
    page: Page, relay: tuple[CuttingRelay, str], large: list[Path]
) -> None:
    gateway, url = relay
    # Three times, since the browser itself sends a part again whose connection was kept open.
    gateway.cuts.extend([False, True, True, True])
    upload_files(page, url, "cut", large)
    expect_ready(page, "cut")
    assert [start // PART_BYTES for start in gateway.starts] == [0, 1, 1, 1, 1]


def test_a_page_left_in_the_middle_goes_on_where_the_server_stands(
    page: Page, relay: tuple[CuttingRelay, str], large: list[Path]
) -> None:
    gateway, url = relay
    gateway.cuts.extend([False] + [True] * 50)
    with page.expect_event("requestfailed", lambda it: it.url.endswith("safetensors")):
        upload_files(page, url, "left", large)
    page.goto("about:blank")
    gateway.cuts.clear()
    gateway.starts.clear()
    upload_files(page, url, "left", large)
    expect_ready(page, "left")
    assert gateway.starts == [PART_BYTES]


def test_a_bad_file_shows_what_the_api_says(page: Page, demo_stack: Stack, initech: Tenant) -> None:
    open_form(page, demo_stack.base_url)
    config, weights = (path.read_bytes() for path in paths_of("json"))
    broken = weights[:-100] + b"\xff" * 100
    page.locator("#upload [type=file]").set_input_files(
        [
            {"name": FILES[0], "mimeType": "application/json", "buffer": config},
            {"name": FILES[1], "mimeType": "application/octet-stream", "buffer": broken},
        ]
    )
    page.locator("#upload").get_by_label("Name", exact=True).fill("broken")
    page.get_by_role("button", name="Upload").click()
    said = initech.upload("broken", dict(zip(FILES, (config, broken), strict=True))).json()
    expect(page.locator("#upload output")).to_have_text(
        f"{said['error']['message']} ({said['error']['code']})"
    )


def test_a_missing_file_is_named_before_anything_is_sent(page: Page, demo_stack: Stack) -> None:
    open_form(page, demo_stack.base_url)
    page.locator("#upload [type=file]").set_input_files(paths_of("json")[:1])
    page.locator("#upload").get_by_label("Name", exact=True).fill("half")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#upload output")).to_contain_text(f"{FILES[1]} is missing")


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 133])
def test_the_pages_sha256_is_that_of_everybody(page: Page, demo_stack: Stack, size: int) -> None:
    open_form(page, demo_stack.base_url)
    url = page.locator("script[src*='upload.js']").get_attribute("src")
    assert url is not None
    data = random.Random(size).randbytes(size)
    found = page.evaluate(
        """async ([url, data]) => {
          const { Sha256 } = await import(url);
          const bytes = Uint8Array.from(data), middle = bytes.length / 3;
          const hash = new Sha256().update(bytes.subarray(0, middle));
          return hash.update(bytes.subarray(middle)).hex();
        }""",
        [url.partition("upload.js")[0] + "sha256.js", list(data)],
    )
    assert found == hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def twice(demo_stack: Stack, initech: Tenant) -> str:
    """An adapter with two versions."""
    for adapter in ("json", "shout"):
        initech.push("twice", DEMO / "adapters" / adapter)
    return f"{demo_stack.base_url}/console/adapters/twice"


def alias_row(page: Page, alias: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=alias, exact=True))


def test_an_alias_is_set_split_and_rolled_back(page: Page, initech: Tenant, twice: str) -> None:
    page.goto(twice)
    meaning = alias_row(page, "stable").get_by_role("cell").nth(1)
    split = {"Version": "2", "Split with version": "1", "for percent": "9"}
    for fields in ({"Version": "1"}, split):
        page.get_by_label("Alias", exact=True).fill("stable")
        for label, value in fields.items():
            page.get_by_label(label, exact=True).fill(value)
        page.get_by_role("button", name="Set alias").click()
        expect(meaning).to_contain_text(f"version {fields['Version']}")
    expect(meaning).to_contain_text("91 % of requests, version 1 for 9 %")
    page.get_by_role("button", name="Roll stable back").click()
    expect(meaning).to_have_text("version 1")
    assert initech.http.get("/v1/adapters/twice").json()["aliases"]["stable"] == 1
    page.get_by_role("link", name="stable", exact=True).click()
    expect(page.locator("#past tbody tr")).to_have_count(3)


def test_a_former_version_becomes_the_latest_again(page: Page, initech: Tenant, twice: str) -> None:
    page.goto(twice)
    page.get_by_role("button", name="Make version 1 the latest").click()
    expect(page.get_by_role("heading", name="Passport of version 1, the latest")).to_be_visible()
    assert initech.http.get("/v1/adapters/twice").json()["latest"]["version"] == 1


def test_what_the_api_refuses_is_said_at_the_form(page: Page, twice: str) -> None:
    page.goto(twice)
    page.get_by_label("Alias", exact=True).fill("stable")
    page.get_by_label("Version", exact=True).fill("7")
    page.get_by_role("button", name="Set alias").click()
    expect(page.get_by_role("alert").filter(has_text="twice@7")).to_be_visible()


def test_the_keyboard_alone_uploads_deletes_and_restores(page: Page, demo_stack: Stack) -> None:
    # From here on choosers are waited for, so that none can open too early.
    page.on("filechooser", lambda _: None)
    page.goto(f"{demo_stack.base_url}/console/adapters")
    tab_to(page, page.locator("summary"))
    if not page.locator("#upload").is_visible():
        page.keyboard.press("Enter")
    tab_to(page, page.locator("#upload [type=file]"))
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(paths_of("json"))
    tab_to(page, page.locator("#upload").get_by_label("Name", exact=True))
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="See its passport")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="typed", exact=True)).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Delete typed"))
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Restore typed"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="typed", exact=True)).to_be_visible()


@pytest.mark.parametrize("width", [400, 800])
def test_no_width_needs_sideways_scrolling(page: Page, twice: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for url in (twice, twice.removesuffix("/twice"), twice.replace("adapters/twice", "offers")):
        page.goto(url)
        assert page.evaluate("document.documentElement.scrollWidth") == width
