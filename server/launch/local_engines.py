"""The processes of base models on this machine: fetchers, engines, stand-ins for engines.

The engine with the highest number leaves first. An engine that left, or was killed while leaving,
or ran when more engines were configured, leaves a journal: until all of it is settled, a process
without a model stands in the engine's place (`engine.retired`).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from engine.wire.endpoint import Endpoint
from server.launch.children import Kind, engine_child, fetcher_child
from server.launch.engine_folders import engine_name, unsettled_engines
from server.launch.gpus import VARIABLE as GPUS_VARIABLE
from server.launch.gpus import visible_gpus
from server.launch.homes import Home
from server.launch.loaded_base import LoadedBase
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec
from server.pool.control_files import Member, WantedEngines, members_file
from server.text.json_object import JsonObject

_KILL_S = 5.0
"""Seconds beyond the time limit of its own shutdown after which an engine is killed."""


class ThisMachine:
    """The place of engines that run on this machine.   module: Python module of the engine."""

    heads: Sequence[ChildSpec] = ()

    def __init__(self, module: str = "engine") -> None:
        self._module = module
        self._engine_config: JsonObject = {}

    @property
    def gpus(self) -> list[str]:
        """The GPUs that engines may take."""
        return visible_gpus(os.environ)

    def run(self, model: LoadedBase, home: Home, gpus: Sequence[str]) -> "LocalEngines":
        """Write the files of a base model's engines. Raises OSError.

        gpus: those of all engines; empty where a single engine takes what it finds, or on a CPU.
        """
        config = model.write_engine_config(home)
        self._engine_config = self._engine_config or config
        return LocalEngines(home, config, model.settings, gpus, self._module)

    def settle(self, home: Home) -> "LocalEngines | None":
        """Stand-ins for the engines of a home without a model; None if all journals are settled.

        Call it after `run`, since they take settings from a base model that runs.
        """
        is_settled = not unsettled_engines(home.folder)
        return None if is_settled else LocalEngines(home, self._engine_config)


class LocalEngines:
    """The processes of one base model; the supervisor calls this at every poll.

    config: that of its engines.   settings: of the base model, whose bounds hold whatever number
    the gateway wants, but for 0: then there is no engine, and stand-ins only until all journals are
    settled. None: there is no model.   gpus: those of all engines.
    is_at_rest: whether no engine was wanted at the last call, and no journal was left to settle.
    """

    def __init__(
        self,
        home: Home,
        config: JsonObject,
        settings: Settings | None = None,
        gpus: Sequence[str] = (),
        module: str = "engine",
    ) -> None:
        self._home = home
        self._config = config
        self._settings = settings
        self._gpus = gpus
        self._module = module
        self._fetchers: list[ChildSpec] = []
        if settings:
            name, reserve_bytes = f"{home.prefix}fetcher", settings.disk_reserve_bytes
            self._fetchers = [fetcher_child(config, settings.storage_url, name, reserve_bytes)]
        self._child = cache(self._make)
        self._wanted = WantedEngines(home.folder)
        self._members = members_file(home.folder)
        self.is_at_rest = False

    def __call__(self) -> list[ChildSpec]:
        """The children that should run now. The list of members for gateways is written first."""
        one = self._settings
        num_engines = self._wanted.within(one.engines, one.most_engines) if one else 0
        engines = range(1, num_engines + 1)
        retired = [it for it in unsettled_engines(self._home.folder) if it > num_engines]
        self._members.keep(tuple(map(self._member, (*engines, *retired))))
        self.is_at_rest = not self._members.content
        made = [self._child(number, "engine") for number in engines]
        return [*self._fetchers, *made, *(self._child(number, "retired") for number in retired)]

    def _member(self, number: int) -> Member:
        name = engine_name(number)
        endpoint = Endpoint.of_socket(self._home.folder / name / "engine.sock")
        return Member(self._home.prefix + name, endpoint.address)

    def _make(self, number: int, kind: Kind) -> ChildSpec:
        """Make a child, with its folder and its configuration; this is done once for each."""
        name, path = engine_name(number), self._home.engine_config(number)
        folder = self._home.folder / name
        folder.mkdir(exist_ok=True)
        config = {**self._config, "data_dir": str(folder)}
        child = engine_child(self._home.prefix + name, kind, path, config, self._module)
        one = self._settings
        if kind == "retired" or one is None:
            return child
        size = one.tensor_parallel_size
        share = self._gpus[(number - 1) * size : number * size]
        own_gpus = {GPUS_VARIABLE: ",".join(share)} if share else {}
        return replace(
            child,
            environment={**child.environment, **own_gpus},
            leave_timeout_s=one.leave_timeout_s + _KILL_S,
        )
