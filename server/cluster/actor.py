"""One engine's actor on a Ray cluster: keeps a process on its node, and says where it listens.

The process (`server.cluster.node`) keeps fetcher and engine running, so that an engine that dies is
back at once and without Ray. No method here waits: the coordinator calls again and again.
"""

import math
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import ray.util

from engine.wire.tcp import ADDRESS_FILE
from server.cluster.pool import Placed, Pool, Role
from server.launch.children import Kind
from server.launch.engine_folders import engine_name
from server.launch.engine_template import EngineTemplate
from server.launch.supervisor import ChildSpec, Supervisor
from server.text.json_object import JsonObject

_MAX_PROBLEM_CHARS = 2000


class EngineActor:
    """The actor of engine `number`.   kind: the process that it runs in the engine's folder."""

    def __init__(self, pool: JsonObject, number: int, kind: Kind) -> None:
        self._pool = Pool(**pool)
        self._name = engine_name(number)
        folder = Path(self._pool.pool_dir) / self._name
        # The node's own folder, for caches and Unix sockets; a successor on this node finds it.
        local = Path(tempfile.gettempdir()) / f"chorale-{self._pool.pool_id}" / self._name
        self._folders = (local.parent, local, folder)
        self._address, self._problem, self._done = (
            folder / ADDRESS_FILE, local / "problem", local / "done"
        )  # fmt: skip
        for former in (self._problem, self._done):
            former.unlink(missing_ok=True)
        node = (self._pool.pool_dir, str(folder), str(local), kind)
        command = (sys.executable, "-m", "server.cluster.node", *node, _node_ip())
        # The exit code says nothing, since Ray has the system wait for its workers' children; and
        # the node kills what does not end in time.
        spec = ChildSpec(
            self._name, command, os.environ, leave_timeout_s=math.inf, on_refusal=lambda _: None
        )
        self._supervisor = Supervisor(lambda: () if self._is_leaving else (spec,))
        self._is_leaving = False

    def tend(self, role: Role) -> JsonObject:
        """Do what `role` asks for. Returns a `Placed` as a dict. Called again and again."""
        # A retired engine need not start again once all of its journal is settled.
        self._is_leaving |= role == "leave" or self._done.exists()
        try:
            if not self._supervisor.pids and not self._is_leaving:
                self._make_ready()
            self._supervisor.tend()
            return asdict(self._placed(is_running=bool(self._supervisor.pids)))
        except OSError as error:
            return asdict(Placed(problem=f"{self._name}: {error}"))

    def _make_ready(self) -> None:
        """Prepare the node for a start. Raises OSError, which says what to do."""
        template = EngineTemplate.path(Path(self._pool.pool_dir))
        if not template.exists():
            raise OSError(
                f"{template} is not on node {_node_ip()}: the data_dir (or pool_dir) must be a "
                "folder that all nodes share, at the same path"
            )
        for folder in self._folders:
            folder.mkdir(mode=0o700, exist_ok=True)
        self._address.unlink(missing_ok=True)

    def _placed(self, *, is_running: bool) -> Placed:
        address = self._address.read_text().strip() if self._address.exists() else ""
        if address and is_running:
            self._problem.unlink(missing_ok=True)
            return Placed(address)
        problem = self._problem.read_text() if self._problem.exists() else ""
        return Placed("", problem[:_MAX_PROBLEM_CHARS], self._is_leaving and not is_running)


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())
