"""`chorale demo` with its real three processes, two tenants and five adapters."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from importlib.resources import files

import httpx
import pytest
from typer.testing import CliRunner

from server.cli import demo as command
from server.cli.main import app
from server.cli.serve import load
from server.cli.terminal import CommandFailed
from tests.ports import free_port

START_TIMEOUT_S = 60.0
DEMO = files("demo")
# First words of the lines that are not indented; URLs and commands are.
OWN_LINES = ["The", "Starting", "Ready", "In", "In", "In", "In", "For", "Ctrl-C", "Stopping;"]


@contextlib.contextmanager
def demo_running(data_dir, port):
    """Run the demo; yield its process and the content of demo.json, and send Ctrl-C at the end."""
    announced, log = data_dir / "demo.json", data_dir.with_suffix(".log")
    options = ("--data-dir", str(data_dir), "--port", str(port))
    # HOME is set since unfinished pushes are remembered there.
    environment = {**os.environ, "CHORALE_THREADS": "1", "HOME": str(data_dir.parent)}
    with (
        log.open("w") as output,
        subprocess.Popen(
            (sys.executable, "-m", "server.cli.main", "demo", *options),
            env=environment, stdout=output, stderr=output,
        ) as p,
    ):  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not announced.exists():
                assert p.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield p, json.loads(announced.read_text())
        finally:
            p.send_signal(signal.SIGINT)
            p.wait(timeout=60)


def ask(made, tenant, model):
    answer = httpx.post(
        f"{made['base_url']}/v1/chat/completions",
        headers={"authorization": f"Bearer {tenant['api_key']}"},
        json={
            "model": model,
            "messages": [{"role": "user", "content": "What does a fox eat?"}],
            "temperature": 0,
        },
        timeout=30,
        trust_env=False,
    )
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.timeout(150)
def test_the_demo_answers_in_every_voice_and_comes_back_with_the_same_keys(tmp_path):
    data_dir, port = tmp_path / "data", free_port()
    with demo_running(data_dir, port) as (process, first):
        assert stat.S_IMODE((data_dir / "demo.json").stat().st_mode) == 0o600
        assert {t["name"]: t["adapters"] for t in first["tenants"]} == {
            "acme": ["json", "shout", "agent"],
            "globex": ["python", "pirate"],
        }
        answers = [ask(first, first["tenants"][0], first["model"])]
        for tenant in first["tenants"]:
            answers += [ask(first, tenant, adapter) for adapter in tenant["adapters"]]
        # Without a tool, agent answers like the base.
        assert len(set(answers)) == 5
        # A later start finds what the first one has made, as long as the server knows it.
        settings = load({"model": "any", "model_name": first["model"], "data_dir": data_dir,
                         "port": port})  # fmt: skip
        assert command._provision(settings, DEMO / "adapters") == first
        without = command._provision(settings, None)["tenants"]
        assert without == [{**tenant, "adapters": []} for tenant in first["tenants"]]
    assert process.returncode == 0
    log = data_dir.with_suffix(".log").read_text()
    before, _, rest = log.partition("(pip install openai):\n\n")
    program, _, after = rest.partition("\n\n")
    assert compile(program, "as it is pasted", "exec").co_names[:2] == ("openai", "OpenAI")
    own_lines = [*before.splitlines(), *after.splitlines()]
    assert [line.split()[0] for line in own_lines if line[:1].strip()] == OWN_LINES
    requests = (data_dir / "logs" / "gateway.log").read_text()
    assert '"route":"/v1/chat/completions"' in requests
    polls = [line for line in requests.splitlines() if '"/ready"' in line]
    assert polls[-1].count('"status":200') == 1
    assert not [line for line in polls if "warning" in line]
    assert f"/#keys={','.join(tenant['api_key'] for tenant in first['tenants'])}" in log
    api_key = first["tenants"][0]["api_key"]
    assert f"export CHORALE_URL={first['base_url']} CHORALE_API_KEY={api_key}" in log
    assert f"export CHORALE_ADMIN_KEY=$(cat {data_dir / 'admin.key'})" in log
    with pytest.raises(httpx.ConnectError):
        httpx.get(first["base_url"], trust_env=False)


def test_another_model_is_served_under_the_name_of_its_folder(monkeypatch):
    seen = []

    def stop(settings, logs):
        seen.append(settings)
        raise CommandFailed("seen")

    monkeypatch.setattr(command, "start_serving", stop)
    CliRunner().invoke(app, ["demo", "--model", str(DEMO / "model")])
    assert [(it.model, it.model_name) for it in seen] == [(str(DEMO / "model"), "model")]


def test_without_adapters_the_requests_to_paste_name_the_model_itself(capsys):
    tenants = [{"name": name, "api_key": f"sk-{name}", "adapters": []} for name in ("a", "b")]
    command._show_what_to_paste({"base_url": "http://here", "model": "m", "tenants": tenants})
    said = capsys.readouterr().out
    assert said.count('{"model": "m", ') == 2
    assert 'model, messages = "m"' in said
