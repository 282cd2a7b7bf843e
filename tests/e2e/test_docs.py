"""Blocks of docs/ that are marked to run do so, on a server as `make demo` starts it."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.ci_scripts import load_script
from tests.ports import free_port

docs = load_script("docs")

START_S = 120.0
LARGE_BYTES = (16 << 20) + 12_345
PAGES = [path for path in docs.pages() if any(block.runs for block in docs.blocks(path))]
# An answer that is an error fails the page.
PRELUDE = """set -euo pipefail
curl() { command curl --fail-with-body "$@"; }
"""


@dataclass(frozen=True)
class Newcomer:
    """A folder in which `chorale demo` runs, and what a reader has exported before."""

    folder: Path
    environment: dict[str, str]

    def run(self, language: str, text: str) -> None:
        if language == "python":
            self._run_python(text)
        else:
            assert language == "sh"
            ran = subprocess.run(
                ["bash", "-c", PRELUDE + text],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=START_S,
            )
            assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"

    def _run_python(self, text: str) -> None:
        """Run a program in this process, where its imports have been made."""
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
            patch.chdir(self.folder)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            exec(compile(text, "block", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "demo").symlink_to(docs.ROOT / "demo")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(docs.ROOT),
    }
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "demo", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as demo:
        try:
            made = folder / ".chorale" / "demo.json"
            deadline = time.monotonic() + START_S
            while not made.exists():
                assert demo.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            told = json.loads(made.read_text())
            yield Newcomer(
                folder,
                environment
                | {
                    "CHORALE_URL": told["base_url"],
                    "CHORALE_ADMIN_KEY": told["admin_key"],
                    "CHORALE_API_KEY": told["tenants"][0]["api_key"],
                },
            )
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.wait(START_S)


def send_large(newcomer: Newcomer, blocks: list[Any]) -> None:
    """Declare and send files of which one has two parts, as the page does with the demo's."""
    folder = newcomer.folder / "large"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(LARGE_BYTES))
    told = 'curl -s "$CHORALE_URL/v1/uploads/$upload" -H "$key" > upload.json'
    text = "\n".join([*(block.text for block in blocks[:2]), told])
    newcomer.run("sh", text.replace("demo/adapters/pirate", "large").replace("curled", "large"))
    upload = json.loads((newcomer.folder / "upload.json").read_text())
    sent = {name: file["received_bytes"] for name, file in upload["files"].items()}
    assert sent == {"adapter_config.json": 2, "adapter_model.safetensors": LARGE_BYTES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(newcomer: Newcomer, path: Path) -> None:
    blocks = [block for block in docs.blocks(path) if block.runs]
    for language, of_language in groupby(blocks, key=lambda block: block.language):
        newcomer.run(language, "\n".join(block.text for block in of_language))
    if path.stem == "adapters":
        send_large(newcomer, blocks)
    if path.stem == "quickstart":
        (export,) = (block.text for block in blocks if "bill.csv" in block.text)
        deadline = time.monotonic() + START_S
        # The last request is settled a moment after its answer.
        while "mine" not in (newcomer.folder / "bill.csv").read_text():
            assert time.monotonic() < deadline
            newcomer.run("sh", export)
