"""What `chorale serve --ray` hands to the process that keeps the engines; Ray is not needed."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from server.launch.engine_template import EngineTemplate, Kind
from server.launch.settings import Settings
from server.pool.keys import PoolKeys
from server.text.json_object import JsonObject

_KILL_S = 15.0
"""What a process may take beyond its own patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerConfig:
    """It holds the engines' keys.

    address: of the cluster, as ray.init takes it.   least, most: engines, whatever is wanted.
    num_cpus: that an engine takes, and num_gpus where it runs on GPUs.
    """

    address: str
    data_dir: str
    pool_dir: str
    pool_id: str
    server_key: str
    least: int
    most: int
    device: str
    num_cpus: int
    num_gpus: int
    template: JsonObject = field(repr=False)

    @classmethod
    def of(
        cls,
        settings: Settings,
        keys: PoolKeys,
        engine_config: JsonObject,
        modules: Mapping[Kind, str],
    ) -> "PlacerConfig":
        """engine_config: fields of engine.config.EngineConfig; folders are the nodes' to give."""
        assert settings.ray is not None
        folder = Path(settings.model).expanduser()
        curve = {"server_key": keys.engine.secret, "client_key": keys.gateway.public}
        template = EngineTemplate(
            model=str(folder.resolve()) if folder.is_dir() else settings.model,
            model_id=settings.model_id,
            base_revision=engine_config["base_revision"],
            config=engine_config | curve,
            storage=settings.storage_url,
            disk_cache_bytes=settings.disk_cache_bytes,
            max_fetches=settings.max_fetches,
            threads=settings.threads,
            stop_timeout_s=settings.leave_timeout_s + _KILL_S,
            modules=dict(modules),
        )
        return cls(
            address=settings.ray,
            data_dir=str(settings.data_dir),
            pool_dir=str(settings.pool_dir or settings.data_dir),
            pool_id=keys.pool_id,
            server_key=keys.engine.public,
            least=settings.engines,
            most=settings.most_engines,
            device=settings.device,
            num_cpus=settings.threads * settings.tensor_parallel_size,
            num_gpus=settings.tensor_parallel_size,
            template=asdict(template),
        )

    @classmethod
    def read(cls, path: Path) -> "PlacerConfig":
        return cls(**json.loads(path.read_text()))

    @property
    def engine_template(self) -> EngineTemplate:
        return EngineTemplate(**self.template)


def placer_command(config_path: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "server.cluster.placer", str(config_path))


def placer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a process that may start a cluster of its own: nothing is reported to anybody."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return quiet | dict(environment)
