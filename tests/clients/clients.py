"""Runs clients unchanged, each in an environment of its own under .clients/."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "clients.toml").read_text())
INSTALLED = [name for name, client in CLIENTS.items() if "recorded" not in client]
RECORDED = [name for name in CLIENTS if name not in INSTALLED]
MAX_AGE = timedelta(days=7)
"""Age of recorded requests after which they say nothing about today's client."""
TOTAL_S = 570
"""Limit of all clients together: ten minutes, less the time pytest takes to begin and to end."""
CLIENT_S = 200
_TORCH = ROOT / ".ci" / "install_torch.py"
# Clients must not use the internet.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class NotGiven(Exception):
    """A registry or this machine does not provide a client's needs, or not within TOTAL_S."""


class Clients:
    """Makes environments, two at a time, while clients run; processes end with it or at TOTAL_S."""

    def __init__(self, names: Iterable[str]):
        self._deadline = time.monotonic() + TOTAL_S
        self._processes: set[subprocess.Popen[str]] = set()
        self._pool = ThreadPoolExecutor(2)
        self._made = {name: self._pool.submit(self._make, name) for name in names}

    def run(self, name: str, cwd: Path, **environment: str) -> list[str]:
        """Run a client's script and return the lines that it printed. Raises NotGiven, and
        AssertionError if the script fails.
        """
        folder = self._made[name].result()
        if "npm" in CLIENTS[name]:
            # Node looks for packages beside the script.
            node = f"{folder}/node_modules/.bin/node"
            command = [node, shutil.copy(HERE / "scripts" / f"{name}.mjs", folder)]
        else:
            command = [f"{folder}/bin/python", "-I", HERE / "scripts" / f"{name}.py"]
        environment |= _OFFLINE | {"HF_HOME": f"{folder}/huggingface"}
        done = self._run(command, CLIENT_S, cwd=cwd, env=os.environ | environment)
        assert done.returncode == 0, f"{name}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout.splitlines()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            _end(process)

    def _make(self, name: str) -> Path:
        """Return the client's folder; it is made again when the pins or Python have changed."""
        client, folder = CLIENTS[name], ROOT / ".clients" / name
        made_from = json.dumps([client, sys.version, _TORCH.read_text()])
        stamp = folder / f"{hashlib.sha256(made_from.encode()).hexdigest()}.stamp"
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for command in _installing(client, folder):
                self._install(command)
            stamp.touch()
        return folder

    def _install(self, command: list[str]) -> None:
        done = self._run(command, TOTAL_S)
        if done.returncode != 0:
            said = done.stderr.splitlines() or ["no reason given"]
            raise NotGiven(next((line for line in said if "No matching" in line), said[-1])[:300])

    def _run(
        self, command: list[Any], limit_s: float, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        what = " ".join(map(str, command[-2:]))
        left_s = max(0.0, self._deadline - time.monotonic())
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(
            command, text=True, start_new_session=True, **pipes, **options
        ) as process:
            self._processes.add(process)
            try:
                printed, complaints = process.communicate(timeout=min(limit_s, left_s))
            except subprocess.TimeoutExpired:
                if limit_s < left_s:
                    raise AssertionError(f"{what} did not end within {limit_s} s") from None
                raise NotGiven(f"{what} had not ended after {TOTAL_S} s in all") from None
            finally:
                _end(process)
                self._processes.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, printed, complaints)


def why_old(name: str, today: date, newest: str | None) -> str | None:
    """Why a client's recorded requests have to be recorded anew, or None if they need not be.

    newest: version of the client that the package index has, None if it does not answer.
    """
    client, why = CLIENTS[name], []
    age = today - client["recorded_on"]
    if age > MAX_AGE:
        why.append(f"are {age.days} days old")
    (pin,) = client["pip"]
    if newest and pin != f"{pin.partition('==')[0]}=={newest}":
        why.append(f"are of {pin}, and {newest} is out")
    if not why:
        return None
    return (
        f"The recorded requests of {name} {' and '.join(why)}. Record them again, "
        f"`python -m tests.clients.record --help` says how, and set recorded_on in clients.toml."
    )


def newest_version(name: str) -> str | None:
    """The newest version of a client's package that the package index has, if it answers."""
    package = CLIENTS[name]["pip"][0].partition("==")[0]
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.match(rf"{package} \((\S+)\)", done.stdout)
    return found[1] if found else None


def _installing(client: dict[str, Any], folder: Path) -> list[list[str]]:
    """Return the commands that install a client. Raises NotGiven if npm is missing."""
    if "npm" in client:
        if not shutil.which("npm"):
            raise NotGiven("npm is not installed")
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        return [npm + client["npm"]]
    python = f"{folder}/bin/python"
    pip = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-compile",
        *client["pip"],
    ]
    torch = [[python, str(_TORCH)]] if client.get("needs_torch") else []
    return [[sys.executable, "-m", "venv", str(folder)], *torch, pip]


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
