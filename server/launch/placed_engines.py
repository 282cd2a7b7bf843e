"""The process that keeps the engines of one base model on a Ray cluster: its placer."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from server.launch.children import GATEWAY_ONLY, environment, write_private
from server.launch.engine_template import Kind
from server.launch.errors import RayMissing
from server.launch.homes import Home
from server.launch.loaded_model import LoadedModel
from server.launch.local_engines import RETIRED
from server.launch.local_pool import unsettled_engines
from server.launch.placer_config import PlacerConfig, placer_command, placer_environment
from server.launch.supervisor import ChildSpec
from server.pool.files import (
    PoolFileDamaged,
    members_path,
    read_members,
    read_wanted,
    wanted_path,
    write_wanted,
)
from server.pool.keys import PoolKeys

_PLACER_STOP_S = 15.0
"""Seconds that the placer gets to deregister from the cluster."""


class PlacedEngines:
    """The placer of a base model, whose configuration lies in the model's home.

    pool_dir: folder of the engines' journals, at this path on every node.
    """

    def __init__(self, home: Home, pool_dir: Path) -> None:
        self._home = home
        self._pool_dir = pool_dir
        command = placer_command(config_path(home))
        own = placer_environment(environment(without=GATEWAY_ONLY))
        self._placer = ChildSpec(f"{home.prefix}placer", command, own, _PLACER_STOP_S, stage=1)

    def __call__(self) -> list[ChildSpec]:
        return [self._placer]

    @property
    def is_at_rest(self) -> bool:
        """Whether no engine is wanted, none is left, and every journal is settled."""
        try:
            wanted = read_wanted(wanted_path(self._home.folder))
            members = read_members(members_path(self._home.folder))
        except PoolFileDamaged:
            return False
        return wanted == 0 and not members and not unsettled_engines(self._pool_dir)


class RayCluster:
    """The place of engines that run on a Ray cluster, which assigns their GPUs itself.

    module: Python module of the engine. Raises RayMissing.
    """

    gpus: Sequence[str] = ()

    def __init__(self, keys: PoolKeys, module: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise RayMissing
        self._keys = keys
        self._modules: Mapping[Kind, str] = {"engine": module, "retired": RETIRED}

    def run(self, model: LoadedModel, home: Home, gpus: Sequence[str]) -> PlacedEngines:
        """Write the configuration of a base model's placer. Raises OSError."""
        settings = model.settings
        if settings.storage is None:
            # The folder is made now, since nodes check that it exists before anything is stored.
            (settings.data_dir / "objects").mkdir(exist_ok=True)
        engine_config = model.write_engine_config(home)
        config = PlacerConfig.of(settings, self._keys, engine_config, self._modules, home)
        write_private(config_path(home), asdict(config))
        return PlacedEngines(home, Path(config.pool_dir))

    def settle(self, home: Home) -> PlacedEngines | None:
        """The placer of a home without a model, as it ran before; None if there is nothing to do.

        It wants no engines, so that only journals are settled.
        """
        try:
            pool_dir = Path(PlacerConfig.read(config_path(home)).pool_dir)
        except (OSError, ValueError, TypeError):
            return None
        if not unsettled_engines(pool_dir):
            return None
        write_wanted(wanted_path(home.folder), 0)
        return PlacedEngines(home, pool_dir)


def config_path(home: Home) -> Path:
    return home.folder / "placer.json"
