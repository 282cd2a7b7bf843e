"""The configuration that `chorale serve --ray` hands to the placer; this module needs no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from server.launch.engine_template import EngineTemplate
from server.launch.homes import Home
from server.launch.settings import Settings
from server.pool.keys import InstallationKeys
from server.text.json_object import JsonObject

_KILL_S = 15.0
"""Seconds beyond the time limit of its own shutdown after which a process is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerConfig:
    """The placer's configuration. It holds the engines' keys.

    address: the cluster's, as ray.init takes it.   address_file: where `server.cluster.head` writes
    the address; "" if `address` holds.   data_dir: the base model's home.   prefix: what the names
    of members begin with.   least, most: bounds of the number of engines, whatever number the
    gateway wants, but for 0.   num_cpus: CPUs that an engine takes, or num_gpus GPUs where it
    runs on GPUs.
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
    template: EngineTemplate = field(repr=False)
    prefix: str = ""
    address_file: str = ""

    @classmethod
    def of(
        cls,
        settings: Settings,
        keys: InstallationKeys,
        engine_config: JsonObject,
        home: Home,
        module: str = "engine",
    ) -> "PlacerConfig":
        """Derive the configuration from the settings of one base model.

        engine_config: fields of engine.config.EngineConfig; each node fills in its folders.
        """
        assert settings.ray is not None
        pool_dir = settings.pool_dir or settings.data_dir
        folder = Path(settings.model).expanduser()
        curve = {"server_key": keys.engine.secret, "client_key": keys.gateway.public}
        template = EngineTemplate(
            model=str(folder.resolve()) if folder.is_dir() else settings.model,
            model_id=settings.model_id,
            config=engine_config | curve,
            storage=settings.storage_url,
            stop_timeout_s=settings.leave_timeout_s + _KILL_S,
            module=module,
        )
        return cls(
            **cluster_of(settings.ray, settings.data_dir),
            data_dir=str(home.folder),
            # A pool has the place in pool_dir that its home has in data_dir.
            pool_dir=str(pool_dir / home.folder.relative_to(settings.data_dir)),
            pool_id="-".join(filter(None, (keys.pool_id, home.slug))),
            prefix=home.prefix,
            server_key=keys.engine.public,
            least=settings.engines,
            most=settings.most_engines,
            device=settings.device,
            num_cpus=settings.threads * settings.tensor_parallel_size,
            num_gpus=settings.tensor_parallel_size,
            template=template,
        )

    @classmethod
    def read(cls, path: Path) -> "PlacerConfig":
        """Read what was written as JSON. Raises OSError, msgspec.DecodeError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def address_file(data_dir: Path) -> Path:
    """The file with the address of the cluster that `--ray local` brings along."""
    return data_dir / "ray.address"


def cluster_of(ray: str, data_dir: Path) -> JsonObject:
    """The fields of PlacerConfig that say where the cluster is.   ray, data_dir: of Settings."""
    file = str(address_file(data_dir)) if ray == "local" else ""
    return {"address": ray, "address_file": file}


def ray_environment(environment: Mapping[str, str], token: str = "") -> dict[str, str]:
    """The environment of placers and head: a cluster of their own reports usage to nobody.

    token: what the cluster asks those who join it for; "" if the environment has it.
    """
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    return quiet | own | dict(environment)
