"""`chorale demo` with its real three processes, two tenants and five adapters."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import httpx
import pytest

import demo
from bench.ports import free_port

START_TIMEOUT_S = 60.0
# First words of the lines that are not indented; URLs, commands and the program are indented.
OWN_LINES = ["The", "Starting", "Ready", "In", "In", "In", "In", "For", "Ctrl-C", "Stopping;"]


@contextlib.contextmanager
def demo_running(data_dir, port, *more):
    """Run the demo; yield its process and the content of demo.json, and send Ctrl-C at the end."""
    announced, log = data_dir / "demo.json", data_dir.with_suffix(".log")
    before = announced.stat().st_mtime_ns if announced.exists() else None
    command = (sys.executable, "-m", "server.cli.main", "demo")
    options = ("--data-dir", str(data_dir), "--port", str(port), *more)
    # HOME is set since unfinished pushes are remembered there.
    environment = {**os.environ, "CHORALE_THREADS": "1", "HOME": str(data_dir.parent)}
    with (
        log.open("w") as output,
        subprocess.Popen((*command, *options), env=environment, stdout=output, stderr=output) as p,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not announced.exists() or announced.stat().st_mtime_ns == before:
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
    assert process.returncode == 0

    with demo_running(data_dir, port) as (process, second):
        assert second == first
        assert ask(second, second["tenants"][0], "json") == answers[1]
    log = data_dir.with_suffix(".log").read_text()
    assert [line.split()[0] for line in log.splitlines() if line[:1].strip()] == OWN_LINES
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


def test_another_model_is_served_to_both_tenants_without_adapters(tmp_path):
    model = ("--model", f"{demo.__path__[0]}/model")
    with demo_running(tmp_path / "data", free_port(), *model) as (_, made):
        assert [made["model"], *(t["adapters"] for t in made["tenants"])] == ["model", [], []]
        assert ask(made, made["tenants"][1], "model")
    log = (tmp_path / "data.log").read_text()
    assert log.count('{"model": "model", ') == 2
    assert 'model, messages = "model"' in log


def test_a_port_that_is_taken_is_the_last_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = (sys.executable, "-m", "server.cli.main", "demo", "--port", port)
        ended = subprocess.run(
            (*command, "--data-dir", str(tmp_path)), capture_output=True, text=True
        )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith(f"Error: Cannot listen on 127.0.0.1:{port}")
