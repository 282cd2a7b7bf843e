"""The processes that keep engines on a Ray cluster: a placer for each base model, maybe a head."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from server.launch.children import GATEWAY_ONLY, environment, write_private
from server.launch.engine_folders import unsettled_engines
from server.launch.homes import Home
from server.launch.loaded_base import LoadedBase
from server.launch.placer_config import (
    PlacerConfig,
    address_file,
    cluster_of,
    ray_environment,
)
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec
from server.pool.control_files import WantedEngines, members_file, wanted_file
from server.pool.keys import InstallationKeys

_PLACER_STOP_S = 15.0
"""Seconds that the placer gets to deregister from the cluster."""
_HEAD_STOP_S = 15.0
"""Seconds that the head gets to end all processes of its cluster."""


class PlacedEngines:
    """The placer of a base model, whose configuration lies in the model's home.

    pool_dir: folder of the engines' journals, at this path on every node.   environment: the
    placer's.
    """

    def __init__(self, home: Home, pool_dir: Path, environment: Mapping[str, str]) -> None:
        self._wanted, self._members = WantedEngines(home.folder), members_file(home.folder)
        self._pool_dir = pool_dir
        command = (sys.executable, "-m", "server.cluster.placer", str(config_path(home)))
        name = f"{home.prefix}placer"
        self._placer = ChildSpec(name, command, environment, _PLACER_STOP_S, stage=1)

    def __call__(self) -> list[ChildSpec]:
        return [self._placer]

    @property
    def is_at_rest(self) -> bool:
        """Whether no engine is wanted, none is left, and every journal is settled."""
        if self._wanted.latest() != 0 or self._members.latest():
            return False
        return not unsettled_engines(self._pool_dir)


class RayCluster:
    """The place of engines that run on a Ray cluster, which assigns their GPUs itself.

    settings: of the server.   module: Python module of the engine. Raises OSError.
    """

    gpus: Sequence[str] = ()

    def __init__(self, settings: Settings, keys: InstallationKeys, module: str = "engine") -> None:
        self._cluster = cluster_of(settings.ray or "auto", settings.data_dir)
        token = secrets.token_hex(32) if self._cluster["address_file"] else ""
        self._environment = ray_environment(environment(without=GATEWAY_ONLY), token)
        # A placer that found the address of an earlier cluster would fail.
        address_file(settings.data_dir).unlink(missing_ok=True)
        self._keys = keys
        self._module = module

    @property
    def heads(self) -> list[ChildSpec]:
        """The process of the cluster that all base models share, if it is of this server alone."""
        if not (path := self._cluster["address_file"]):
            return []
        command = (sys.executable, "-m", "server.cluster.head", path)
        return [ChildSpec("head", command, self._environment, _HEAD_STOP_S)]

    def run(self, model: LoadedBase, home: Home, gpus: Sequence[str]) -> PlacedEngines:
        """Write the configuration of a base model's placer. Raises OSError."""
        settings = model.settings
        if settings.storage is None:
            # The folder is made now, since nodes check that it exists before anything is stored.
            (settings.data_dir / "objects").mkdir(exist_ok=True)
        engine_config = model.write_engine_config(home)
        config = PlacerConfig.of(settings, self._keys, engine_config, home, self._module)
        write_private(config_path(home), asdict(config))
        return PlacedEngines(home, Path(config.pool_dir), self._environment)

    def settle(self, home: Home) -> PlacedEngines | None:
        """The placer of a home without a model, as it ran before; None if there is nothing to do.

        It wants no engines, so that only journals are settled, on the cluster that there is now.
        Raises OSError.
        """
        try:
            config = PlacerConfig.read(config_path(home))
        except (OSError, msgspec.DecodeError):
            return None
        pool_dir = Path(config.pool_dir)
        if not unsettled_engines(pool_dir):
            return None
        wanted_file(home.folder).write(0)
        write_private(config_path(home), asdict(replace(config, **self._cluster)))
        return PlacedEngines(home, pool_dir, self._environment)


def config_path(home: Home) -> Path:
    return home.folder / "placer.json"
