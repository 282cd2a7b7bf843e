"""`chorale doctor`, called as an operator does, beside a real gateway in this process."""

import json
import shutil

import httpx
import pytest
from typer.testing import CliRunner

from server.cli.figures import NAMES
from server.cli.main import app
from server.launch.secrets import Secrets
from tests.server.in_process import ADMIN_KEY, DEMO, InProcess


@pytest.fixture
def run(tmp_path):
    """A function that runs the doctor, and returns its exit code, its rows by check, and stdout."""

    def run(*arguments):
        call = ("doctor", "--data-dir", tmp_path, "--json", *arguments)
        result = CliRunner().invoke(app, [*map(str, call)])
        return result.exit_code, {row["check"]: row for row in json.loads(result.stdout)}, result

    return run


@pytest.fixture
def product(sqlite_database, tmp_path):
    sqlite_database.close()
    product = InProcess.build(tmp_path, sqlite_database.url.render_as_string())
    yield product
    product.close()


@pytest.fixture
def url(make_api, product):
    def handle(request):
        path, headers = request.url.raw_path.decode(), dict(request.headers)
        answer = product.operator.call(request.method, path, None, headers, request.content)
        kept = {name: answer.headers[name] for name in ("content-type",)}
        return httpx.Response(answer.status_code, headers=kept, content=answer.content)

    return make_api(handle).url


def test_before_the_first_start_nothing_is_wrong_and_nothing_is_made(run, tmp_path):
    exit_code, rows, _ = run("--model", DEMO, "--port", "0")
    assert exit_code == 0
    of_machine = {"memory", "open files"}
    assert {name for name, row in rows.items() if row["verdict"] != "ok"} - of_machine == {
        "schema", "clocks", "gateway",
    }  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_gateway_that_serves_is_well_and_a_token_comes(run, product, url, monkeypatch):
    monkeypatch.setenv("CHORALE_ADMIN_KEY", ADMIN_KEY)
    settings = ("--model", DEMO, "--model-name", "base")
    Secrets.load(product.gateway.settings.data_dir)
    exit_code, rows, _ = run(*settings, "--url", url)
    assert (exit_code, rows["request"]["verdict"]) == (0, "skipped")
    assert "CHORALE_API_KEY" in rows["request"]["do"]
    monkeypatch.setenv("CHORALE_API_KEY", product.user("acme").api_key)
    exit_code, rows, _ = run(*settings, "--url", url)
    assert (exit_code, rows["request"]["verdict"]) == (0, "ok"), rows
    monkeypatch.setenv("CHORALE_API_KEY", "sk-wrong")
    exit_code, rows, result = run(*settings, "--url", url)
    assert (exit_code, rows["request"]["verdict"]) == (1, "wrong")
    assert "sk-wrong" not in result.output


def test_the_gateway_has_every_metric_that_the_commands_read(product):
    text = product.operator.call("GET", "/metrics").text
    assert [name for name in NAMES.values() if name.removesuffix("_total") not in text] == []


def test_all_that_is_wrong_is_named_at_once_and_the_exit_code_says_so(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    (model / "model.safetensors").unlink()
    secret = Secrets.load(tmp_path).pepper
    (tmp_path / "secrets" / "pepper").chmod(0o644)
    (tmp_path / "chorale.db").write_bytes(bytes(4096))
    config = tmp_path / "chorale.toml"
    config.write_text(
        f"disk_reserve_bytes = {1 << 60}\nredis_url = 'redis://:{secret}@127.0.0.1:1'"
    )
    exit_code, rows, result = run("--model", model, "--config", config, "--port", "0")
    assert exit_code == 1
    assert {name for name, row in rows.items() if row["verdict"] == "wrong"} == {
        "private files", "model model", "disk of data_dir", "database", "schema", "Redis",
    }  # fmt: skip
    assert all(row["do"] for row in rows.values() if row["verdict"] == "wrong")
    assert secret not in result.output


def test_a_setting_that_does_not_exist_is_named_with_its_place(run, monkeypatch):
    monkeypatch.setenv("CHORALE_MAX_LORAS", "8")
    exit_code, rows, _ = run("--model", DEMO)
    assert (exit_code, list(rows)) == (1, ["settings", "all others"])
    assert "CHORALE_MAX_LORAS in the environment" in rows["settings"]["found"]


def test_without_a_model_the_settings_of_the_last_start_are_checked(run, product, tmp_path):
    last = product.gateway.settings.model_dump(mode="json") | {"port": 1}
    (tmp_path / "gateway.json").write_text(json.dumps({"settings": last}))
    _, rows, _ = run()
    assert rows["settings"]["verdict"] == "ok"
    assert "model base" in rows
    _, rows, _ = run("--storage", "ftp://x")
    assert rows["settings"]["verdict"] == "wrong"
    assert rows["store"]["verdict"] == "ok", "the other checks go on with the last start's"


def test_a_person_gets_a_table(run, tmp_path):
    call = ("doctor", "--model", DEMO, "--data-dir", tmp_path, "--port", "0")
    result = CliRunner().invoke(app, [*map(str, call)])
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["check", "verdict", "found", "do"]
    assert rows[0].split()[:2] == ["settings", "ok"]
    assert "\x1b" not in result.stdout
