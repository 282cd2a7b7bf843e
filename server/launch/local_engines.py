"""The processes of one base model on this machine: a fetcher, engines, stand-ins for engines."""

import os
from collections.abc import Sequence
from dataclasses import replace

from server.launch.children import base_revision_of, engine_child, fetcher_child, write_private
from server.launch.gpus import VARIABLE as GPUS_VARIABLE
from server.launch.gpus import share_of, visible_gpus
from server.launch.homes import Home
from server.launch.loaded_base import LoadedBase
from server.launch.local_pool import LocalPool, MakeChild, engine_name, unsettled_engines
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec
from server.text.json_object import JsonObject

RETIRED = "engine.retired"
"""Module that stands in an engine's place."""
_KILL_S = 5.0
"""Seconds beyond the time limit of its own shutdown after which an engine is killed."""


class ThisMachine:
    """The place of engines that run on this machine.   module: Python module of the engine."""

    heads: Sequence[ChildSpec] = ()

    def __init__(self, module: str) -> None:
        self._module = module
        self._engine_config: JsonObject = {}

    @property
    def gpus(self) -> list[str]:
        """The GPUs that engines may take."""
        return visible_gpus(os.environ)

    def run(self, model: LoadedBase, home: Home, gpus: Sequence[str]) -> LocalPool:
        """Write the files of a base model's engines. Raises OSError.

        gpus: those of all engines; empty where a single engine takes what it finds, or on a CPU.
        """
        settings, config = model.settings, model.write_engine_config(home)
        self._engine_config = self._engine_config or config

        def make_engine(number: int) -> ChildSpec:
            folder = home.folder / engine_name(number)
            folder.mkdir(exist_ok=True)
            path = home.engine_config(number)
            write_private(path, {**config, "data_dir": str(folder)})
            name = home.prefix + engine_name(number)
            child = engine_child(name, self._module, path, settings.threads)
            share = share_of(number, settings.tensor_parallel_size, gpus)
            own_gpus = {GPUS_VARIABLE: share} if gpus else {}
            return replace(
                child,
                environment={**child.environment, **own_gpus},
                leave_timeout_s=settings.leave_timeout_s + _KILL_S,
            )

        return LocalPool(
            home.folder,
            prefix=home.prefix,
            least=settings.engines,
            most=settings.most_engines,
            make_engine=make_engine,
            make_retired=_maker_of_retired(home, config),
            fetcher=_fetcher(settings, home),
        )

    def settle(self, home: Home) -> LocalPool | None:
        """Stand-ins for the engines of a home without a model; None if all journals are settled.

        Call it after `run`, since they take settings from a base model that runs.
        """
        if not unsettled_engines(home.folder):
            return None
        make_retired = _maker_of_retired(home, self._engine_config)
        return LocalPool(
            home.folder,
            prefix=home.prefix,
            least=0,
            most=0,
            make_engine=make_retired,  # there is none to make
            make_retired=make_retired,
        )


def _maker_of_retired(home: Home, config: JsonObject) -> MakeChild:
    def make_retired(number: int) -> ChildSpec:
        name, path = engine_name(number), home.engine_config(number)
        # The engine's open requests ran on the model that it was started with.
        ran_on = {"base_revision": base_revision_of(path) or config["base_revision"]}
        write_private(path, {**config, "data_dir": str(home.folder / name), **ran_on})
        return engine_child(home.prefix + name, RETIRED, path, threads=1)

    return make_retired


def _fetcher(settings: Settings, home: Home) -> ChildSpec:
    return fetcher_child(
        f"{home.prefix}fetcher",
        socket=home.fetcher_socket,
        storage=settings.storage_url,
        cache=home.folder / "cache" / "adapters",
        quota_bytes=settings.disk_cache_bytes,
        max_fetches=settings.max_fetches,
        reserve_bytes=settings.disk_reserve_bytes,
    )
