"""deploy/compose.yaml without containers: its two machines as processes, by its own commands.

Every setting is the file's own. Only the surroundings of a container are replaced: folders stand
for mounts, ports are free ones, and addresses stand for the names of PostgreSQL, Redis and the
object store.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.ports import free_port
from tests.deployment_files import Compose, filled_variables, image_environment
from tests.e2e.stack import Stack

# Settings for tests only: arenas are small, and clients, gateways and engines share two cores, so
# Redis gets a longer deadline: the other processes may be late.
TEST_SETTINGS = {
    "CHORALE_ARENA_BYTES": str(64 << 20),
    "CHORALE_MAX_MODEL_LEN": "512",
    "CHORALE_REDIS_DEADLINE_S": "2.0",
    "OMP_NUM_THREADS": "1",
}


class Machine(Stack):
    """One of the file's machines. addresses: replacements for parts of the file's values."""

    def __init__(
        self,
        name: str,
        service: Mapping[str, Any],
        folder: Path,
        model: Path,
        addresses: Mapping[str, str],
    ) -> None:
        self.name = name
        self.data_dir = folder / name
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        environment = image_environment() | service["environment"]
        self.admin_key = environment["CHORALE_ADMIN_KEY"]
        self.model = environment["CHORALE_MODEL_NAME"]
        self.tenants = []
        self._clients = {}
        self._process = None
        self._command = service["command"]
        mounts = {
            "CHORALE_MODEL": str(model),
            "CHORALE_DATA_DIR": str(self.data_dir),
            "CHORALE_PORT": str(self.port),
        }
        replaced = {k: _replace(v, addresses) for k, v in environment.items() if k != "PATH"}
        self._environment = replaced | mounts | TEST_SETTINGS

    def start(self, *, wait: bool = True, **_: str) -> "Machine":
        command = [sys.executable, "-m", "server.cli.main", *self._command]
        self._process = subprocess.Popen(command, env=os.environ | self._environment)
        if wait:
            self.wait_ready()
        return self

    def terminate(self) -> None:
        """Ask the machine to end, as `docker stop` does."""
        assert self._process
        self._process.terminate()

    def wait_gone(self) -> int:
        """Wait for the machine's end and return its exit status. The file's own limit is longer."""
        assert self._process
        return self._process.wait(60)

    @property
    def operator(self) -> httpx.Client:
        return self.client(self.admin_key)


def machines(folder: Path, model: Path, addresses: Mapping[str, str]) -> list[Machine]:
    """Return the machines of compose.yaml, in its order; they are not started."""
    compose = Compose.read(filled_variables())
    return [Machine(name, s, folder, model, addresses) for name, s in compose.machines.items()]


def _replace(value: str, addresses: Mapping[str, str]) -> str:
    for name, address in addresses.items():
        value = value.replace(name, address)
    return value
