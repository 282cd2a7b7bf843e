"""The real product, started for a benchmark with its own command line and stopped after it."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from bench.process_tree import children_cpu_seconds
from server.client.http import Client
from server.client.uploads import Uploader

CHORALE = (sys.executable, "-m", "server.cli.main")

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 90.0
_HTTP_TIMEOUT_S = 120.0
_POLL_S = 0.05
_LOG_TAIL = 4000


class ProductFailed(Exception):
    """The product did not start or refused a request; str() ends with its log or its answer."""


class Product:
    """A running Chorale, used through its public endpoints."""

    def __init__(self, url: str, admin_key: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process
        self._admin_key = admin_key

    def create_tenant(self, name: str, **limits: int) -> str:
        """Create a tenant and return its API key."""
        self.call("POST", "/admin/v1/tenants", self._admin_key, json={"name": name, **limits})
        path = f"/admin/v1/tenants/{name}/keys"
        return str(self.call("POST", path, self._admin_key, json={"name": "bench"})["api_key"])

    def push_adapter(self, key: str, name: str, folder: Path) -> None:
        """Upload a PEFT folder as the owner of `key`."""
        with Client(self.url, key) as client:
            Uploader(client).push(name, folder)

    def cpu_seconds(self) -> dict[str, float]:
        return children_cpu_seconds(self.process.pid)

    def call(
        self, method: str, path: str, key: str, headers: dict[str, str] | None = None, **body: Any
    ) -> dict[str, Any]:
        """Send a request and return its answer, which is JSON. Raises ProductFailed."""
        answer = httpx.request(
            method,
            self.url + path,
            headers={"authorization": f"Bearer {key}", **(headers or {})},
            timeout=_HTTP_TIMEOUT_S,
            trust_env=False,
            **body,
        )
        if answer.is_error:
            raise ProductFailed(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        parsed: dict[str, Any] = answer.json()
        return parsed


@contextmanager
def serving(
    settings: Mapping[str, str | int | float],
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Product]:
    """Run `chorale serve` with these settings and its data in `folder`, until the context ends.

    environment: variables added to this process's.
    """
    port, admin_key = free_port(), f"bench-{secrets.token_hex(16)}"
    config = folder / "chorale.toml"
    values = {**settings, "data_dir": str(folder / "data"), "port": port}
    # Plain strings and numbers are the same in JSON and in TOML.
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    config.write_text("".join(lines))
    secret = {"CHORALE_ADMIN_KEY": admin_key}
    command = (*CHORALE, "serve", "--config", str(config))
    with started(command, folder / "chorale.log", {**environment, **secret}) as process:
        product = Product(f"http://127.0.0.1:{port}", admin_key, process)
        wait_ready(product.url, process, folder / "chorale.log")
        yield product


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, its output in `log`. At the end it gets SIGTERM, and SIGKILL if it goes on."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, path: str = "/ready") -> None:
    """Wait until `path` answers 200. Raises ProductFailed."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}{path}", timeout=1.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:  # nobody listens yet
            pass
        time.sleep(_POLL_S)
    raise ProductFailed(f"{url} is not ready:\n{log.read_text(errors='replace')[-_LOG_TAIL:]}")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
