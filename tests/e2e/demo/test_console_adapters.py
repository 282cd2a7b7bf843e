"""The console's pages of adapters in a real browser: uploads, and changes by forms."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect
from safetensors.numpy import load_file, save_file

from tests.e2e.conftest import DEMO
from tests.e2e.console_browser import drop, tab_to
from tests.e2e.cutting_relay import CuttingRelay
from tests.e2e.stack import FILES, Stack, Tenant

TENANT = "initech"
PART_BYTES = 16 << 20


def paths_of(adapter: str) -> list[Path]:
    return [DEMO / "adapters" / adapter / file for file in FILES]


def open_form(page: Page, base_url: str) -> Locator:
    page.goto(f"{base_url}/console/adapters")
    page.locator("#uploading").evaluate("details => { details.open = true }")
    return page.locator("#upload [type=file]")


def upload(page: Page, base_url: str, paths: list[Path], name: str) -> None:
    open_form(page, base_url).set_input_files(paths)
    send(page, name)


def send(page: Page, name: str) -> None:
    page.locator("#upload").get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Upload").click()


def expect_ready(page: Page, name: str) -> None:
    expect(page.locator("#upload [role=status]")).to_contain_text(f"{name}@1 is ready")


def test_an_upload_by_the_chooser_becomes_ready_and_shows_its_passport(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    upload(page, demo_stack.base_url, paths_of("json"), "chosen")
    expect_ready(page, "chosen")
    size_bytes = sum(path.stat().st_size for path in paths_of("json"))
    assert page.locator("progress").evaluate("bar => [bar.value, bar.max]") == [size_bytes] * 2
    expect(page.get_by_role("link", name="chosen", exact=True)).to_be_visible()
    page.get_by_role("link", name="See its passport").click()
    digest = tenant.http.get("/v1/adapters/chosen").json()["latest"]["digest"]
    expect(page.get_by_text(digest)).to_be_visible()
    expect(page.locator("dd", has_text="passed")).to_be_visible()
    expect(page.locator("#where")).to_contain_text("device")


def test_of_files_that_are_dropped_the_two_of_an_adapter_are_taken(
    page: Page, demo_stack: Stack
) -> None:
    files = open_form(page, demo_stack.base_url)
    drop(page, [*paths_of("shout"), Path(__file__)])
    demo_stack.wait(lambda: files.evaluate("input => input.files.length") == 2)
    send(page, "dropped")
    expect_ready(page, "dropped")


@pytest.fixture
def relay(demo_stack: Stack) -> Iterator[tuple[CuttingRelay, str]]:
    """A relay before the gateway, and its URL."""
    relay = CuttingRelay(demo_stack.port)
    with relay.running() as url:
        yield relay, url


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
    upload(page, url, large, "cut")
    expect_ready(page, "cut")
    assert [start // PART_BYTES for start in gateway.starts] == [0, 1, 1, 1, 1]


def test_a_page_left_in_the_middle_goes_on_where_the_server_stands(
    page: Page, relay: tuple[CuttingRelay, str], large: list[Path]
) -> None:
    gateway, url = relay
    gateway.cuts.extend([False] + [True] * 50)
    with page.expect_event("requestfailed", lambda it: it.url.endswith("safetensors")):
        upload(page, url, large, "left")
    page.goto("about:blank")
    gateway.cuts.clear()
    gateway.starts.clear()
    upload(page, url, large, "left")
    expect_ready(page, "left")
    assert gateway.starts == [PART_BYTES]


def test_a_missing_file_is_named_and_of_a_bad_one_is_shown_what_the_api_says(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    files, output = open_form(page, demo_stack.base_url), page.locator("#upload output")
    files.set_input_files(paths_of("json")[:1])
    send(page, "broken")
    expect(output).to_contain_text(f"{FILES[1]} is missing")
    config, weights = (path.read_bytes() for path in paths_of("json"))
    broken = weights[:-100] + b"\xff" * 100
    files.set_input_files(
        [
            {"name": FILES[0], "mimeType": "application/json", "buffer": config},
            {"name": FILES[1], "mimeType": "application/octet-stream", "buffer": broken},
        ]
    )
    send(page, "broken")
    said = tenant.upload("broken", dict(zip(FILES, (config, broken), strict=True))).json()
    expect(output).to_have_text(f"{said['error']['message']} ({said['error']['code']})")


def test_the_pages_sha256_is_that_of_everybody(page: Page, demo_stack: Stack) -> None:
    open_form(page, demo_stack.base_url)
    url = page.locator("script[src*='upload.js']").get_attribute("src")
    assert url is not None
    chance = random.Random(1)
    texts = [chance.randbytes(size) for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 133)]
    found = page.evaluate(
        """async ([url, texts]) => {
          const { Sha256 } = await import(url);
          return texts.map((data) => {
            const bytes = Uint8Array.from(data), middle = bytes.length / 3;
            const hash = new Sha256().update(bytes.subarray(0, middle));
            return hash.update(bytes.subarray(middle)).hex();
          });
        }""",
        [url.partition("upload.js")[0] + "sha256.js", list(map(list, texts))],
    )
    assert found == [hashlib.sha256(data).hexdigest() for data in texts]


def alias_row(page: Page, alias: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=alias, exact=True))


def test_an_alias_is_split_and_rolled_back_and_a_former_version_is_the_latest_again(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    for adapter in ("json", "shout"):
        tenant.push("twice", DEMO / "adapters" / adapter)
    page.goto(f"{demo_stack.base_url}/console/adapters/twice")
    meaning = alias_row(page, "stable").get_by_role("cell").nth(1)
    split = {"Version": "2", "Split with version": "1", "for percent": "9"}
    for fields in ({"Version": "1"}, split):
        page.get_by_label("Alias", exact=True).fill("stable")
        for label, value in fields.items():
            page.get_by_label(label, exact=True).fill(value)
        page.get_by_role("button", name="Set alias").click()
        expect(meaning).to_contain_text(f"version {fields['Version']}")
    expect(meaning).to_contain_text("91 % of requests, version 1 for 9 %")
    page.get_by_role("button", name="Roll back stable").click()
    expect(meaning).to_have_text("version 1")
    page.get_by_role("button", name="Make latest: version 1").click()
    expect(page.get_by_role("heading", name="Passport of version 1, the latest")).to_be_visible()
    now = tenant.http.get("/v1/adapters/twice").json()
    assert (now["latest"]["version"], now["aliases"]["stable"]) == (1, 1)
    page.get_by_role("link", name="stable", exact=True).click()
    expect(page.locator("#past tbody tr")).to_have_count(3)


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
