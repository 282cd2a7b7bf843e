"""Prepares the start of `chorale serve`: the processes and their files, made from the settings.

fetcher   python -m lora.fetch    object store to disk; has the store's credentials
engine    python -m engine        has a model; no credentials, no database; one or several
gateway   python -m server        HTTP; has database, store and admin key; one or several
placer    python -m server.cluster.placer   instead of the first two, on a Ray cluster
head      python -m server.cluster.head     the cluster itself, if it is of this machine alone

There is one head at most; each base model has its own fetcher and engines
(`server.launch.supervised_bases`), and all have the same gateways (`server.launch.gateways`).
"""

from registry.extras import require
from server.launch.gateways import Gateways, listen
from server.launch.homes import Home
from server.launch.local_engines import ThisMachine
from server.launch.placed_engines import RayCluster
from server.launch.secrets import Secrets
from server.launch.settings import Settings
from server.launch.supervised_bases import Place, SupervisedBases
from server.pool.keys import InstallationKeys


def resolve_settings(settings: Settings) -> Settings:
    """The settings with an absolute data directory, which is made, and a port that is free now.

    Raises ServeError.
    """
    data_dir = settings.data_dir.expanduser().resolve()
    Home(data_dir).check_sockets(settings.of_models()[0].most_engines)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = free_port(settings.host, settings.port)
    others = {
        name: folder.expanduser().resolve()
        for name in ("pool_dir", "spool_dir")
        if (folder := getattr(settings, name)) is not None
    }
    return settings.model_copy(update={"data_dir": data_dir, "port": port, **others})


def prepare(settings: Settings, *, engine_module: str = "engine") -> SupervisedBases:
    """Write the files that the processes read at start. Returns what the supervisor runs.

    settings: as `resolve_settings` returns them.   engine_module: tests replace it.
    Raises ServeError, ExtraMissing.
    """
    _check_extras(settings)
    data_dir = settings.data_dir
    secrets = Secrets.load(data_dir, may_make=not shares_parts(settings))
    place: Place = ThisMachine(engine_module)
    if settings.ray is not None:
        place = RayCluster(settings, InstallationKeys.of(secrets.pepper), engine_module)
    return SupervisedBases(settings, place, Gateways(settings))


def _check_extras(settings: Settings) -> None:
    """Raise ExtraMissing here, where the operator looks, and not in a process that dies of it."""
    if settings.storage_url.startswith("s3:"):
        require("Storage in a bucket", "boto3")
    if (settings.database_url or "").startswith("postgres"):
        require("A PostgreSQL database", "psycopg")
    if settings.ray is not None:
        require("A Ray cluster", "ray")
    if settings.otlp_endpoint is not None:
        require("Tracing", "opentelemetry.exporter.otlp.proto.http")


def shares_parts(settings: Settings) -> bool:
    """Whether other gateways may share the database or Redis; they need the same secrets."""
    url = settings.database_url or "sqlite"
    return settings.redis_url is not None or not url.startswith("sqlite")


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. The gateway binds it later; this only complains early.

    Raises AddressInUse.
    """
    with listen(host, port) as probe:
        return int(probe.getsockname()[1])
