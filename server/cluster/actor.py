"""One engine's actor on a Ray cluster: keeps a process on its node, and says where it listens.

The process (`server.cluster.node`) keeps fetcher and engine running, so that an engine that dies is
back at once and without Ray. No method here waits: the coordinator calls again and again.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import ray.util

from engine.wire.tcp import ADDRESS_FILE
from server.cluster.pool import Placed, Pool, Role
from server.launch.children import Kind
from server.launch.engine_folders import engine_name
from server.launch.engine_template import EngineTemplate
from server.launch.supervisor import Backoff, SupervisorConfig, die_with_parent
from server.text.json_object import JsonObject

_MAX_PROBLEM_CHARS = 2000


class EngineActor:
    """The actor of engine `number`.   kind: the process that it runs in the engine's folder."""

    def __init__(self, pool: JsonObject, number: int, kind: Kind) -> None:
        self._pool = Pool(**pool)
        self._kind = kind
        self._name = engine_name(number)
        self._folder = Path(self._pool.pool_dir) / self._name
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = Backoff(SupervisorConfig())
        self._started_at = self._due_at = 0.0
        self._is_leaving = False
        self._problem = ""

    def tend(self, role: Role) -> JsonObject:
        """Do what `role` asks for. Returns a `Placed` as a dict. Called again and again."""
        try:
            return asdict(self._tend(role, time.monotonic()))
        except OSError as error:
            return asdict(Placed(problem=f"{self._name}: {error}"))

    def _tend(self, role: Role, now: float) -> Placed:
        if self._process and self._process.poll() is not None:
            self._take_end(now)
        if role == "leave" and not self._is_leaving:
            self._is_leaving = True
            if self._process:
                self._process.terminate()
        if self._process is None and not self._is_leaving and now >= self._due_at:
            self._start(now)
        address = self._address() if self._process else ""
        if address:
            self._problem = ""
        return Placed(address, self._problem, self._is_leaving and self._process is None)

    def _take_end(self, now: float) -> None:
        """Note the end of the process, as the files say that it left on the node.

        The exit code says nothing: Ray has the system wait for its workers' children.
        """
        self._process = None
        self._due_at = now + self._backoff.next_delay_s(now - self._started_at)
        said = self._local / "problem"
        self._problem = said.read_text()[:_MAX_PROBLEM_CHARS] if said.exists() else ""
        # A retired engine need not start again once all of its journal is settled.
        if self._kind == "retired" and (self._local / "done").exists():
            self._is_leaving = True

    def _start(self, now: float) -> None:
        self._started_at = now
        self._check_pool_dir()
        for folder in (self._local.parent, self._local):
            folder.mkdir(mode=0o700, exist_ok=True)
        for name in ("problem", "done"):
            (self._local / name).unlink(missing_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / ADDRESS_FILE).unlink(missing_ok=True)
        folders = (self._pool.pool_dir, str(self._folder), str(self._local))
        node = (*folders, self._kind, ray.util.get_node_ip_address())
        self._process = subprocess.Popen(
            (sys.executable, "-m", "server.cluster.node", *node),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )

    def _check_pool_dir(self) -> None:
        """Check that this node sees the pool's folder. Raises OSError, which says what to do."""
        template = EngineTemplate.path(Path(self._pool.pool_dir))
        if not template.exists():
            raise OSError(
                f"{template} is not on node {ray.util.get_node_ip_address()}: the data_dir (or "
                "pool_dir) must be a folder that all nodes share, at the same path"
            )

    def _address(self) -> str:
        try:
            return (self._folder / ADDRESS_FILE).read_text().strip()
        except FileNotFoundError:
            return ""

    @property
    def _local(self) -> Path:
        """The node's own folder, for caches and Unix sockets; a successor on this node finds it."""
        return Path(tempfile.gettempdir()) / f"chorale-{self._pool.pool_id}" / self._name
