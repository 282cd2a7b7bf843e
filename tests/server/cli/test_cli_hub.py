"""Adapters from a hub, a small local one, which huggingface_hub calls in separate processes.

huggingface_hub reads its environment when it is imported, so all pushes of this file's tests run in
two other processes: one with a hub, and one that is told to be offline.
"""

import json
import os
import subprocess
import sys

import httpx
import pytest

from server.client.files import CONFIG_FILE, WEIGHTS_FILE
from tests.server.fake_api import Api, is_one_line
from tests.server.fake_uploads import FakeUploads

COMMIT, OLDER = "c" * 40, "0" * 40
WEIGHTS = bytes(range(256)) * 8
# huggingface_hub saves a download in steps of 10 MiB.
MANY_WEIGHTS, BROKEN_OFF = bytes(12 << 20), 11 << 20

RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from server.cli.main import app

def run(arguments):
    result = CliRunner().invoke(app, ["adapters", "push", *arguments, "--name", "mine"])
    return [result.exit_code, result.stderr]

json.dump({" ".join(arguments): run(arguments) for arguments in json.loads(sys.argv[1])},
          sys.stdout)
"""


class FakeHub:
    """A hub that serves lists of files, and HEAD and GET of files, with errors by header."""

    def __init__(self):
        files = {CONFIG_FILE: b"{}", WEIGHTS_FILE: WEIGHTS}
        steps = {f"step-{n}/{name}": content for n in (9, 10) for name, content in files.items()}
        self.repos = {
            "org/whole": {
                COMMIT: {**files, "README.md": b"#", "optimizer.pt": b"o"},
                OLDER: {**files, CONFIG_FILE: b'{"r": 4}'},
            },
            "org/moving": {COMMIT: files, OLDER: {**files, WEIGHTS_FILE: WEIGHTS[::-1]}},
            "org/broken-off": {COMMIT: {**files, WEIGHTS_FILE: MANY_WEIGHTS}},
            "org/pickled": {COMMIT: {CONFIG_FILE: b"{}", "adapter_model.bin": b"\x80"}},
            "org/steps": {COMMIT: {**steps, "step-9/optimizer.pt": b"o"}},
            "org/model": {COMMIT: {"config.json": b"{}"}},
        }
        self.asked = []

    def __call__(self, request):
        path = request.url.path
        if path.startswith("/api/models/"):
            org, name, *rest = path.split("/")[3:]
            revision, filename = rest[1] if rest else "main", None
        else:
            org, name, _, revision, filename = path.strip("/").split("/", 4)
        self.asked.append((request.method, name, filename, request.headers.get("range")))
        if name == "gated":
            return httpx.Response(403, headers={"x-error-code": "GatedRepo"})
        commits = self.repos.get(f"{org}/{name}")
        if commits is None:
            return httpx.Response(404, headers={"x-error-code": "RepoNotFound"})
        if revision == "main":
            has_moved = name == "moving" and filename == WEIGHTS_FILE
            revision = OLDER if has_moved else COMMIT
        if revision not in commits:
            return httpx.Response(404, headers={"x-error-code": "RevisionNotFound"})
        headers = {"x-repo-commit": revision}
        if filename is None:
            siblings = [{"rfilename": each} for each in commits[revision]]
            return httpx.Response(
                200, json={"id": f"{org}/{name}", "sha": revision, "siblings": siblings}
            )
        if filename not in commits[revision]:
            return httpx.Response(404, headers={**headers, "x-error-code": "EntryNotFound"})
        content = commits[revision][filename]
        return self._give(request, name, filename, content, headers)

    def _give(self, request, name, filename, content, headers):
        headers["etag"] = f'"{hash(content):x}"'
        if request.method == "HEAD":
            return httpx.Response(200, headers={**headers, "content-length": str(len(content))})
        first = int(request.headers.get("range", "bytes=0-")[6:].partition("-")[0])
        if name == "broken-off" and filename == WEIGHTS_FILE and first == 0:
            headers |= {"content-length": str(len(content)), "connection": "close"}
            return httpx.Response(200, headers=headers, content=content[:BROKEN_OFF])
        if first:
            headers["content-range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        return httpx.Response(206 if first else 200, headers=headers, content=content[first:])


def run_all(folder, hub_url, server_url, commands, **environment):
    """Run pushes in one process, one after another; {arguments: (exit code, stderr)}."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("HF_")}
    own = {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(folder / "hub"),
        "HOME": str(folder),
        "CHORALE_URL": server_url,
        "CHORALE_API_KEY": "tenant-key",
        "NO_PROXY": "127.0.0.1",
    }
    arguments = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    done = subprocess.run(arguments, env=kept | own | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # No library writes to stderr; the commands' own output was captured.
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The hub, the server, and the results of the pushes online and offline."""
    folder, hub, server = tmp_path_factory.mktemp("hub"), FakeHub(), FakeUploads(16 << 20)
    hub_api, server_api = Api(hub), Api(server)
    online = [
        ["org/whole"],
        ["org/whole", "--revision", OLDER],
        ["org/moving"],
        ["org/broken-off"],
        ["org/pickled"],
        ["org/steps"],
        ["org/steps/step-9"],
        ["org/model"],
        ["org/gated"],
        ["org/nothing"],
        ["org/whole", "--revision", "v9"],
    ]
    try:
        results = run_all(folder, hub_api.url, server_api.url, online)
        offline = run_all(
            folder,
            hub_api.url,
            server_api.url,
            [["org/whole"], ["org/steps/step-9"], ["org/new"]],
            HF_HUB_OFFLINE="1",
        )
    finally:
        hub_api.close()
        server_api.close()
    return hub, server, results, offline


def test_an_adapter_of_the_hub_is_downloaded_here_and_pushed(world):
    _, server, results, _ = world
    assert results["org/whole"][0] == 0
    assert results["org/whole"][1].splitlines() == [
        "Left out: other files (README.md), training state (optimizer.pt).",
        "mine@1 is published.",
    ]
    files = server.uploads["up_0"]["content"]
    assert files == {CONFIG_FILE: {0: b"{}"}, WEIGHTS_FILE: {0: WEIGHTS}}


def test_a_revision_is_what_is_pushed(world):
    _, server, results, _ = world
    assert results[f"org/whole --revision {OLDER}"][0] == 0
    assert server.uploads["up_1"]["content"][CONFIG_FILE] == {0: b'{"r": 4}'}


def test_both_files_are_of_one_commit_though_the_branch_moves(world):
    _, server, _, _ = world
    assert server.uploads["up_2"]["content"][WEIGHTS_FILE] == {0: WEIGHTS}


def test_a_download_that_breaks_off_goes_on_where_it_stopped(world):
    hub, server, results, _ = world
    exit_code, stderr = results["org/broken-off"]
    assert exit_code == 0, stderr
    assert is_one_line(stderr, "mine@1 is published.")
    assert server.uploads["up_3"]["content"][WEIGHTS_FILE] == {0: MANY_WEIGHTS}
    assert ("GET", "broken-off", WEIGHTS_FILE, f"bytes={10 << 20}-") in hub.asked


def test_what_was_downloaded_once_is_pushed_offline(world):
    _, _, _, offline = world
    assert [offline[name][0] for name in ("org/whole", "org/steps/step-9")] == [0, 0]


def test_only_files_of_the_adapter_are_ever_downloaded(world):
    hub, _, _, _ = world
    assert {file for method, _, file, _ in hub.asked if method == "GET" and file} == {
        CONFIG_FILE,
        WEIGHTS_FILE,
        "adapter_model.bin",
        f"step-9/{CONFIG_FILE}",
        f"step-9/{WEIGHTS_FILE}",
    }


def test_a_folder_of_a_repository_is_pushed_by_its_path(world):
    _, _, results, _ = world
    exit_code, stderr = results["org/steps/step-9"]
    assert exit_code == 0, stderr
    assert stderr.splitlines()[0] == "Left out: training state (optimizer.pt)."


def test_the_server_never_hears_of_the_hub(world):
    _, server, _, _ = world
    assert not any("org" in path for _, path in server.log)
    assert {upload["adapter"] for upload in server.uploads.values()} == {"mine"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("org/pickled", "adapter_model.bin is damaged, or holds more than tensors"),
        (
            "org/steps",
            "org/steps has 2 adapters: step-9, step-10. Push one: chorale adapters push "
            "org/steps/step-10 --name",
        ),
        ("org/model", "org/model has no adapter_config.json"),
        ("org/gated", "org/gated is gated: ask for access"),
        ("org/nothing", "There is no folder org/nothing, and the hub has none of this name"),
        ("org/whole --revision v9", "org/whole has no revision v9."),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(world, arguments, sentence):
    exit_code, stderr = world[2][arguments]
    assert exit_code == 1
    assert is_one_line(stderr, "Error: ", sentence)


def test_a_hub_that_is_not_there_is_one_line(world):
    exit_code, stderr = world[3]["org/new"]
    assert exit_code == 1
    assert is_one_line(stderr, "The hub does not answer", "HF_HUB_OFFLINE")
