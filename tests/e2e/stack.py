"""The whole product as a user starts it, on a free port and a folder of its own."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from bench.process_tree import find_children
from tests.ports import free_port

ADMIN_KEY = "the-operators-own-admin-key"
FILES = ("adapter_config.json", "adapter_model.safetensors")
START_S = 120.0
# Secrets that gateways on one database must share.
SECRETS = {"CHORALE_PEPPER": "1" * 64, "CHORALE_RECEIPT_SIGNING_KEY": "2" * 64}


@dataclass
class Tenant:
    """A tenant with one key."""

    stack: "Stack"
    tenant_id: str
    name: str
    api_key: str
    adapters: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    @property
    def http(self) -> httpx.Client:
        """HTTP client with this tenant's key; the stack closes it."""
        return self.stack.client(self.api_key)

    def push(self, name: str, folder: Path, **asked: Any) -> httpx.Response:
        """Upload both files of a PEFT folder; return the answer to the upload's completion.

        asked: further fields of the request that begins the upload.
        """
        contents = {file: (folder / file).read_bytes() for file in FILES}
        answer = self.upload(name, contents, asked)
        assert answer.status_code == 200, answer.text
        self.adapters.append(name)
        return answer

    def upload(
        self,
        name: str,
        contents: dict[str, bytes],
        asked: Mapping[str, Any] = MappingProxyType({}),
        **declared: Any,
    ) -> httpx.Response:
        """Upload any bytes; return the first answer that is an error, else the completion's.

        asked: further fields of the request.   declared: fields that replace those of a file in it.
        """
        files = {
            file: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            | declared.get(file, {})
            for file, data in contents.items()
        }
        created = self.http.post(f"/v1/adapters/{name}/uploads", json={"files": files, **asked})
        if created.is_error:
            return created
        upload = created.json()["id"]
        for file, data in contents.items():
            put = self.http.put(f"/v1/uploads/{upload}/files/{file}", content=data)
            if put.is_error:
                return put
        return self.http.post(f"/v1/uploads/{upload}/complete")


class Stack:
    """`chorale serve` and its operator. fake_engine: run without a model; all else is real.

    module: what starts the processes.
    """

    _making_client = threading.Lock()

    def __init__(
        self,
        data_dir: Path,
        model: Path,
        *,
        fake_engine: bool = False,
        module: str = "tests.e2e.serve",
        **settings: Any,
    ):
        self.data_dir = data_dir
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.admin_key = ADMIN_KEY
        self.model = "base"
        self.tenants: list[Tenant] = []
        self._clients: dict[str, httpx.Client] = {}
        self._settings = {
            "model": str(model),
            "model_name": self.model,
            "data_dir": str(data_dir),
            "port": self.port,
            "threads": 1,
            "arena_bytes": 64 << 20,
            "drain_timeout_s": 5.0,
        } | settings
        if "models" in settings:
            del self._settings["model"], self._settings["model_name"]
        self._shares = {"database_url", "redis_url"} & settings.keys()
        self._module = module
        self._engine_module = "tests.engine.fake_engine" if fake_engine else "engine"
        self._process: subprocess.Popen[bytes] | None = None

    # ---- processes ----

    def start(self, *, wait: bool = True, **environment: str) -> "Stack":
        self.data_dir.mkdir(parents=True, exist_ok=True)
        path = self.data_dir / "settings.json"
        path.write_text(json.dumps(self._settings))
        env = os.environ | {"OMP_NUM_THREADS": "1", "CHORALE_ADMIN_KEY": ADMIN_KEY}
        env |= (SECRETS if self._shares else {}) | environment
        command = [sys.executable, "-m", self._module, str(path), self._engine_module]
        self._process = subprocess.Popen(command, env=env)
        if wait:
            self.wait_ready()
        return self

    def make_cold(self) -> None:
        """Leave adapters in the store alone: an upload's proof has loaded its adapter."""
        self.kill("fetcher")
        shutil.rmtree(self.data_dir / "cache" / "adapters", ignore_errors=True)
        self.kill("engine")
        # The gateway may say that it is ready until it has noticed.
        self.wait(self._answers)

    def _answers(self) -> bool:
        """Whether an engine answers. A request that was on its way at two deaths would be refused,
        so none is the same as another.
        """
        body = {"model": self.model, "prompt": uuid.uuid4().hex, "max_tokens": 1}
        return self.tenants[0].http.post("/v1/completions", json=body).status_code == 200

    def wait_ready(self) -> None:
        self.wait(lambda: self.operator.get("/ready").status_code == 200)

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def pid(self, name: str) -> int:
        """Return the id of `engine`, `engine-2`, `gateway` or `fetcher`. Raises LookupError."""
        mark = "lora.fetch" if name == "fetcher" else f"/{name}.json"
        return find_children(self.pids()[0], mark)[0]

    def pids(self) -> list[int]:
        """Return the process ids of the supervisor and its children."""
        assert self._process
        return [self._process.pid, *find_children(self._process.pid)]

    def kill(self, name: str) -> None:
        """SIGKILL a process and wait for its end; the supervisor starts it again."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        _wait_until_dead(pid)

    def die(self) -> None:
        """SIGKILL the supervisor, whose children die with it, as when the power fails."""
        assert self._process
        children = find_children(self._process.pid)
        self._process.kill()
        self._process.wait()
        for pid in children:
            _wait_until_dead(pid)

    @staticmethod
    def wait(condition: Callable[[], object], timeout_s: float = START_S) -> None:
        """Wait until `condition` holds; TransportError and LookupError mean that it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError, LookupError):
                if condition():
                    return
            time.sleep(0.05)
        raise AssertionError(f"{condition} did not come true in {timeout_s:.0f} s")

    # ---- users ----

    @property
    def operator(self) -> httpx.Client:
        return self.client(ADMIN_KEY)

    def client(self, key: str) -> httpx.Client:
        with self._making_client:  # threads that ask at once get one client, which is closed
            if key not in self._clients:
                headers = {"authorization": f"Bearer {key}"}
                url = self.base_url
                self._clients[key] = httpx.Client(base_url=url, headers=headers, timeout=60)
            return self._clients[key]

    def tenant(self, name: str, **limits: Any) -> Tenant:
        created = self.operator.post("/admin/v1/tenants", json={"name": name, **limits})
        assert created.status_code == 201, created.text
        key = self.operator.post(f"/admin/v1/tenants/{name}/keys", json={"name": "test"}).json()
        tenant = Tenant(self, created.json()["tenant_id"], name, key["api_key"])
        self.tenants.append(tenant)
        return tenant

    def settled_events(self, count: int) -> list[dict[str, Any]]:
        """Return all usage events, once there are at least `count`."""

        def events() -> list[dict[str, Any]]:
            lines = self.operator.get("/admin/v1/usage/export?format=jsonl").text.splitlines()
            entries = [json.loads(line) for line in lines]
            return [entry for entry in entries if entry["kind"] == "usage"]

        self.wait(lambda: len(events()) >= count)
        return events()


@contextlib.contextmanager
def running(data_dir: Path, model: Path, **settings: Any) -> Iterator[Stack]:
    environment = settings.pop("environment", {})
    stack = Stack(data_dir, model, **settings)
    try:
        yield stack.start(**environment)
    finally:
        stack.stop()


def process_of(argument: Path) -> int:
    """Return the id of the process that was started with an argument. Raises LookupError."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if str(argument) in (entry / "cmdline").read_bytes().decode().split("\0"):
                return int(entry.name)
    raise LookupError(argument)


def _wait_until_dead(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has reaped it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.001)
