"""`chorale models`, called as an operator does."""

import json

import httpx
import pytest

from tests.server.fake_api import list_of, make_run

PATH = "/admin/v1/models"


def shown(name="qwen", state="serving", home="/data/bases/qwen-1", **fields):
    return {
        "object": "base_model", "name": name, "state": state, "origin": "added", "home": home,
        "base_revision": "3c" * 32, "max_model_len": 512, "engines": 1, "requests_here": 2,
        "problem": None, **fields,
    }  # fmt: skip


class Server:
    """Base models whose states a test scripts: one list for each time that it is asked."""

    def __init__(self, make_api, monkeypatch, tmp_path):
        self.lists = [[shown()]]
        self.is_changed = True
        self.api = make_api(self.answer)
        self.run = make_run(self.api.url, monkeypatch, tmp_path)

    def answer(self, request):
        if request.method == "GET":
            data = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
            return httpx.Response(200, json=list_of(*data)[1])
        return httpx.Response(200, json={"name": "qwen", "is_changed": self.is_changed})


@pytest.fixture
def server(make_api, monkeypatch, tmp_path):
    monkeypatch.setattr("server.cli.models._LOOK_S", 0)
    return Server(make_api, monkeypatch, tmp_path)


def test_a_model_is_a_line_with_what_it_does(server):
    header, line = server.run("models", "list").stdout.splitlines()
    assert header.split()[:5] == ["name", "state", "origin", "engines", "requests_here"]
    assert line.split()[:6] == ["qwen", "serving", "added", "1", "2", "3c" * 6]
    assert json.loads(server.run("models", "list", "--json").stdout) == [shown()]


def test_a_replacement_is_waited_for_until_it_serves(server):
    old, new = shown(), shown(home="/data/bases/qwen-2")
    server.lists = [
        [old],
        [old, shown(state="preparing", home="")],
        [shown(state="leaving"), {**new, "state": "starting"}],
        [shown(state="leaving"), new],
    ]
    said = server.run("models", "add", "/models/qwen/", "--set", "quantization=int8", "--set",
                      "engines=2")  # fmt: skip
    assert said.exit_code == 0
    assert said.stderr.splitlines() == [
        f"qwen: {it}" for it in ("preparing", "starting", "serving")
    ]
    body = {"name": "qwen", "model": "/models/qwen/",
            "settings": {"quantization": "int8", "engines": 2}}  # fmt: skip
    assert ("POST", PATH, body) in server.api.asked()


def test_a_model_that_cannot_be_served_ends_the_command_with_the_reason(server):
    server.lists = [[], [shown(state="failed", home="", problem="there is no such folder")]]
    said = server.run("models", "add", "/models/qwen")
    assert said.exit_code == 1
    assert "qwen cannot be served: there is no such folder" in said.stderr


def test_what_is_there_already_is_not_waited_for(server):
    server.is_changed = False
    said = server.run("models", "add", "/models/qwen")
    assert (said.exit_code, "is there already" in said.stderr) == (0, True)


def test_a_setting_without_a_value_is_refused_before_the_server_is_asked(server):
    said = server.run("models", "add", "/models/qwen", "--set", "quantization")
    assert (said.exit_code, server.api.asked()) == (2, [])
    assert "NAME=VALUE" in said.stderr


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [
        ("drain", "POST", f"{PATH}/org/qwen/drain"),
        ("resume", "POST", f"{PATH}/org/qwen/resume"),
        ("rm", "DELETE", f"{PATH}/org/qwen"),
    ],
)
def test_a_model_is_drained_resumed_and_removed_by_its_name(server, command, method, path):
    assert "org/qwen" in server.run("models", command, "org/qwen").stderr
    assert server.api.asked() == [(method, path, None)]
