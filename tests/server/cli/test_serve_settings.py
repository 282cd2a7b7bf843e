"""The settings of `chorale serve` at its start and after SIGHUP, with a fake plan."""

import functools
import logging

import httpx
import pytest
from typer.testing import CliRunner

from server.cli import serve
from server.cli.main import app
from server.cli.serve import base_url, load
from server.launch.settings import Settings


class FakePlan:
    def __init__(self):
        self.models = []

    def set_models(self, settings):
        self.models.append([one.model_id for one in settings.of_models()])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "chorale.toml"
    path.write_text('max_skips = 3\n[[models]]\nmodel = "a"\n')
    return path


@pytest.fixture
def take_again(config, caplog):
    """Write the file, take it on; return the lists of models that were set, and the log."""
    reload = functools.partial(load, {"block_size": 32}, config)
    plan, given = FakePlan(), reload()

    def take(text):
        caplog.clear()
        config.write_text(text)
        with caplog.at_level(logging.INFO):
            serve._take_again(plan, given, reload)
        return plan.models, caplog.text

    return take


def test_after_a_hangup_the_models_are_those_of_the_file(take_again):
    models, log = take_again('max_skips = 3\n[[models]]\nmodel = "b"\n[[models]]\nmodel = "c"\n')
    assert models == [["b", "c"]]
    assert "Restart" not in log


def test_changes_that_need_a_restart_are_named(take_again):
    models, log = take_again('max_skips = 4\nport = 1\n[[models]]\nmodel = "a"\n')
    assert models == [["a"]]
    assert "Restart `chorale serve` to have these changes: max_skips, port" in log


@pytest.mark.parametrize("text", ["models = 3", "[[", 'max_loras = 1\nmodel = "a"'])
def test_a_file_with_an_error_changes_nothing_and_is_named(take_again, text):
    models, log = take_again(text)
    assert models == []
    assert "The settings are left as they are: " in log


def test_a_model_is_given_once_for_each_base_model(monkeypatch):
    seen = []

    def stop(flags, config=None):
        seen.append({name: value for name, value in flags.items() if value is not None})
        raise serve.CommandFailed("seen")

    monkeypatch.setattr(serve, "load", stop)
    for arguments in ([], ["--model", "a"], ["--model", "a", "--model", "b", "--engines", "2"]):
        CliRunner().invoke(app, ["serve", *arguments])
    assert seen == [
        {},
        {"model": "a"},
        {"models": [{"model": "a"}, {"model": "b"}], "engines": 2},
    ]


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("chorale.lan", "chorale.lan"),
     ("::1", "::1"), ("::", "::1"), ("fd00::7", "fd00::7")],
)  # fmt: skip
def test_a_url_is_one_that_parsers_read(host, reached_at):
    url = httpx.URL(base_url(Settings(model="m", host=host, port=8001)))
    assert (url.host, url.port) == (reached_at, 8001)
