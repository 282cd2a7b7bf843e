"""A Ray cluster of this machine, and the whole product with its engines on that cluster."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.launch.secrets import Secrets
from server.pool.keys import InstallationKeys
from tests.e2e.stack import Stack, process_of
from tests.e2e.streams import wait_until_ready

REPOSITORY = Path(__file__).parents[2]
HEAL_S = 60.0


class Cluster:
    """A Ray cluster. environment: variables that a process needs to use it."""

    def __init__(self, folder: Path) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = token | {"RAY_USAGE_STATS_ENABLED": "0"}
        own = {
            "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "FAKE_STEP_S": "0.05",
            "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.cluster", "8"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | self.environment | own | {"PYTHONPATH": str(REPOSITORY)},
        )
        self.address = self._read()

    def actors(self, stack: Stack, slug: str = "") -> list[str]:
        """Return the names of living actors.   slug: that of the base model's home."""
        return self._ask("actors " + "-".join(filter(None, (namespace(stack), slug)))).split()

    def kill(self, stack: Stack, name: str) -> None:
        """Kill the actor whose name begins with `name`; Ray starts it again."""
        self._ask(f"kill {namespace(stack)} {name}")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the cluster has ended"
        return line.strip()


class ClusterStack(Stack):
    """A stack with its engines on a cluster. `kill` also reaches processes that are not the
    supervisor's children: "engine-2" by its process, "actor 2" and "coordinator" by Ray.
    """

    def __init__(self, cluster: Cluster, data_dir: Path, model: Path, **settings: Any) -> None:
        usual = {
            "ray": cluster.address, "engines": 2, "slo_first_token_s": 60.0, "max_model_len": 512,
        }  # fmt: skip
        super().__init__(data_dir, model, **usual | settings)
        self.cluster = cluster

    def kill(self, name: str) -> None:
        if name == "placer":
            super().kill(name)
        elif name == "coordinator":
            self.cluster.kill(self, name)
        elif name.startswith("actor "):
            self.cluster.kill(self, f"engine/{name.removeprefix('actor ')}/")
        else:
            os.kill(process_of(self.data_dir / f"{name}.json"), signal.SIGKILL)


def start(stack: Stack, environment: dict[str, str]) -> None:
    """Start a stack and wait until it has two engines."""
    stack.start(wait=False, **environment)
    stack.wait(lambda: stack.operator.get("/ready").status_code == 200, HEAL_S)
    wait_until_ready(stack, 2)


def namespace(stack: Stack) -> str:
    return f"chorale-{InstallationKeys.of(Secrets.load(stack.data_dir).pepper).pool_id}"


@contextlib.contextmanager
def short() -> Iterator[Path]:
    """Make a folder outside of pytest's: it holds Unix sockets, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
