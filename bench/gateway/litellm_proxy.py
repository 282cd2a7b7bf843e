"""LiteLLM's proxy as a peer: one process, a virtual key with limits that are counted, no database.

LiteLLM's database client wants a binary that no package index has (prisma's query engine), so keys
come from its custom authentication and limits are counted in its memory. That is less work than
LiteLLM does with its database: no key is looked up, no spend is written.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.gateway.http_client import HttpTarget
from bench.product import free_port, started, wait_ready

VERSION = "1.106.2"
_KEY = "sk-bench"
_MODEL = "bench"
_ROUTE = "/v1/chat/completions"
_AUTH = f'''
from litellm.proxy._types import UserAPIKeyAuth

MUCH = 10**9

async def user_api_key_auth(request, api_key: str) -> UserAPIKeyAuth:
    if api_key != "{_KEY}":
        raise ValueError("no such key")
    return UserAPIKeyAuth(
        api_key=api_key, rpm_limit=MUCH, tpm_limit=MUCH, max_parallel_requests=MUCH
    )
'''


def make_environment(folder: Path) -> Path:
    """Return the path of the proxy's command; its virtual environment is made if there is none."""
    command = folder / "bin" / "litellm"
    if not command.exists():
        venv.create(folder, with_pip=True)
        package = f"litellm[proxy]=={VERSION}"
        subprocess.run((folder / "bin" / "pip", "install", "--quiet", package), check=True)
    return command


@contextmanager
def upstream(folder: Path, *, step_s: float = 0.0) -> Iterator[int]:
    """Run the OpenAI-compatible server that the proxy stands in front of. Yields its port."""
    port, log = free_port(), folder / "upstream.log"
    command = (sys.executable, "-m", "bench.gateway.fake_upstream", str(port))
    with started(command, log, {"PACED_STEP_S": str(step_s)}) as process:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield port


@contextmanager
def serving(command: Path, upstream_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """Run the proxy. Yields its (port, pid) once it has answered a request."""
    port, log = free_port(), folder / "litellm.log"
    (folder / "bench_auth.py").write_text(_AUTH)
    served = {
        "model": f"openai/{_MODEL}",
        "api_base": f"http://127.0.0.1:{upstream_port}/v1",
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": _MODEL, "litellm_params": served}],
        "general_settings": {
            "master_key": "sk-operator",
            "custom_auth": "bench_auth.user_api_key_auth",
        },
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR", "PYTHONPATH": str(folder), "PATH": os.environ["PATH"],
    }  # fmt: skip
    arguments: tuple[str, ...] = ("--config", str(folder / "config.yaml"), "--host", "127.0.0.1")
    arguments += ("--port", str(port), "--telemetry", "False")
    with started((str(command), *arguments), log, environment) as process:
        wait_ready(f"http://127.0.0.1:{port}", process, log, path="/health/liveliness")
        answer = httpx.post(
            f"http://127.0.0.1:{port}{_ROUTE}",
            content=target(port, 1).body,
            headers={"authorization": f"Bearer {_KEY}", "content-type": "application/json"},
            timeout=60,
            trust_env=False,
        )
        answer.raise_for_status()
        assert "x-ratelimit-api_key-remaining-tokens" in answer.headers, "limits are counted"
        yield port, process.pid


def target(port: int, max_tokens: int, *, stream: bool = False) -> HttpTarget:
    """Return the target for the proxy, or for its upstream, which ignores the key."""
    return HttpTarget(port, _KEY, _MODEL, max_tokens, stream)
