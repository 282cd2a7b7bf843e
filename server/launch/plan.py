"""The processes of `chorale serve`, made from the settings; each gets no more than it needs.

fetcher   python -m lora.fetch    object store to disk; has the store's credentials
engine    python -m engine        has the model; no credentials, no database; one or several
gateway   python -m server        HTTP; has the database, the store and the admin key
placer    python -m server.cluster.placer   instead of the first two, on a Ray cluster
"""

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from engine.wire import write_vocabulary
from registry.base_model import BaseModel
from registry.errors import UnsupportedBaseModel
from server.launch.children import (
    CLUSTER,
    GATEWAY_ONLY,
    base_revision_of,
    engine_child,
    environment,
    fetcher_child,
    write_private,
)
from server.launch.engine_template import Kind
from server.launch.errors import (
    AddressInUse,
    DataDirTooLong,
    ModelNotServed,
    RayMissing,
    TooFewGpus,
)
from server.launch.gpus import VARIABLE as GPUS_VARIABLE
from server.launch.gpus import share_of, visible_gpus
from server.launch.local_pool import LocalPool, engine_name
from server.launch.model_folder import find_model
from server.launch.placer_config import PlacerConfig, placer_command, placer_environment
from server.launch.secrets import Secrets
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec, Plan
from server.pool.keys import PoolKeys
from server.text.json_object import JsonObject
from server.text.tokenizer import TemplateError, Tokenizer, UnsupportedTokenizer

_MAX_SOCKET_PATH = 100
"""Most bytes in the path of a Unix socket; Linux has room for 107."""
_SETTLE_S = 10.0
"""Seconds a gateway gets after the drain to read and post the last journal records."""
_KILL_S = 5.0
"""Seconds beyond the time limit of its own shutdown after which an engine is killed."""
_PLACER_STOP_S = 15.0
"""Seconds that the placer gets to deregister from the cluster."""
_RETIRED = "engine.retired"


def resolve_settings(settings: Settings) -> Settings:
    """The settings with an absolute data directory, which is made, and a port that is free now.

    Raises AddressInUse, DataDirTooLong.
    """
    data_dir = settings.data_dir.expanduser().resolve()
    longest = data_dir / engine_name(settings.most_engines) / "engine.sock"
    if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
        raise DataDirTooLong(data_dir)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = _free_port(settings.host, settings.port)
    others = {
        name: folder.expanduser().resolve()
        for name in ("pool_dir", "spool_dir")
        if (folder := getattr(settings, name)) is not None
    }
    return settings.model_copy(update={"data_dir": data_dir, "port": port, **others})


def prepare(
    settings: Settings,
    *,
    engine_module: str = "engine",
    gateway_module: str = "server",
) -> Plan:
    """Write the files that the processes read at start. Returns the plan: who runs, in order.

    settings: as `resolve_settings` returns them.   engine_module, gateway_module: tests replace
    them. Raises ServeError, SecretError.
    """
    data_dir = settings.data_dir
    secrets = Secrets.load(data_dir, may_make=not _shares(settings))
    model_dir = find_model(settings.model)
    try:
        base = BaseModel.load(model_dir, settings.model_id, data_dir / "cache")
        tokenizer = Tokenizer(model_dir)
    except (UnsupportedBaseModel, UnsupportedTokenizer) as error:
        raise ModelNotServed(str(error)) from error
    _check_length(settings, base)
    (data_dir / "engine").mkdir(exist_ok=True)
    write_vocabulary(data_dir / "engine" / "vocabulary", tokenizer.vocabulary)
    gateway_config = {"settings": settings.model_dump(mode="json"), "model_dir": str(model_dir)}
    write_private(data_dir / "gateway.json", gateway_config)
    engine_config = _engine_config(settings, base, tokenizer)
    fetcher, gateway = _fetcher(settings), _gateway(settings, gateway_module)
    if settings.ray is not None:
        placer = _placer(settings, secrets, engine_config, engine_module)
        return lambda: [placer, gateway]
    pool = _local_pool(settings, engine_config, engine_module)
    pool()
    return lambda: [fetcher, *pool(), gateway]


def _shares(settings: Settings) -> bool:
    """Whether other gateways may share the database or Redis; they need the same secrets."""
    url = settings.database_url or "sqlite"
    return settings.redis_url is not None or not url.startswith("sqlite")


def _check_length(settings: Settings, base: BaseModel) -> None:
    longest = base.config.get("max_position_embeddings")
    if settings.max_model_len and longest and settings.max_model_len > longest:
        raise ModelNotServed(
            f"max_model_len is {settings.max_model_len}; {base.model_id} was made for {longest}."
        )


def _engine_config(settings: Settings, base: BaseModel, tokenizer: Tokenizer) -> JsonObject:
    """The fields of engine.config.EngineConfig by name, since the engine reads them from a file.

    data_dir is missing, since each engine has one of its own.
    """
    data_dir = settings.data_dir
    same = (
        "device", "dtype", "quantization", "kv_cache_dtype", "batch_invariant",
        "speculation", "draft_pool_bytes", "enforce_eager", "lora_overlap", "reference_kernels",
        "arena_bytes", "memory_utilization", "threads", "tensor_parallel_size", "max_model_len",
        "block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting",
        "max_sum_ranks_per_step", "max_skips", "scheduling_policy", "prefix_caching", "swap_bytes",
        "disk_cache_bytes", "host_cache_bytes", "prefetch_per_tenant", "fetch_timeout_s",
        "max_fetches", "max_pinned_share", "leave_timeout_s", "hold_lifetime_s", "damaged_journal",
    )  # fmt: skip
    return {
        "model_dir": str(base.path),
        "base_revision": base.base_revision,
        "unquantized_model_dir": str(settings.unquantized_model.resolve())
        if settings.unquantized_model
        else None,
        "draft_model_dir": str(settings.draft_model.resolve()) if settings.draft_model else None,
        "vocabulary_path": str(data_dir / "engine" / "vocabulary"),
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "public_prefixes": _public_prefixes(settings.public_prompts, tokenizer),
        "adapter_cache_dir": str(data_dir / "cache" / "adapters"),
        "fetcher_socket": str(data_dir / "engine" / "fetch.sock"),
        **{name: getattr(settings, name) for name in same},
    }


def _public_prefixes(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each text as the prefix of a prompt, and as a chat's system message."""
    prefixes = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt in prompts:
        # Two chats with the same system message have the same tokens up to its end.
        with contextlib.suppress(TemplateError):
            one, other = (
                tokenizer.encode(tokenizer.render(_chat(prompt, user)), add_special_tokens=False)
                for user in ("a", "1")
            )
            prefixes.append(list(os.path.commonprefix([one, other])))
    return prefixes


def _chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _fetcher(settings: Settings) -> ChildSpec:
    return fetcher_child(
        socket=settings.data_dir / "engine" / "fetch.sock",
        storage=settings.storage_url,
        cache=settings.data_dir / "cache" / "adapters",
        quota_bytes=settings.disk_cache_bytes,
        max_fetches=settings.max_fetches,
        reserve_bytes=settings.disk_reserve_bytes,
    )


def _local_pool(settings: Settings, config: JsonObject, module: str) -> LocalPool:
    """The plan of this machine's engines.   config: fields that all share. Raises TooFewGpus."""
    data_dir, size = settings.data_dir, settings.tensor_parallel_size
    gpus = _gpus_to_share(settings)

    def make_engine(number: int) -> ChildSpec:
        name = engine_name(number)
        (data_dir / name).mkdir(exist_ok=True)
        path = data_dir / f"{name}.json"
        write_private(path, {**config, "data_dir": str(data_dir / name)})
        child = engine_child(name, module, path, settings.threads)
        own_gpus = {GPUS_VARIABLE: share_of(number, size, gpus)} if gpus else {}
        return replace(
            child,
            environment={**child.environment, **own_gpus},
            leave_timeout_s=settings.leave_timeout_s + _KILL_S,
        )

    def make_retired(number: int) -> ChildSpec:
        name = engine_name(number)
        path = data_dir / f"{name}.json"
        # The engine's open requests ran on the model that it was started with.
        ran_on = {"base_revision": base_revision_of(path) or config["base_revision"]}
        write_private(path, {**config, "data_dir": str(data_dir / name), **ran_on})
        return engine_child(name, _RETIRED, path, threads=1)

    return LocalPool(
        data_dir,
        least=settings.engines,
        most=settings.most_engines,
        make_engine=make_engine,
        make_retired=make_retired,
    )


def _placer(settings: Settings, secrets: Secrets, config: JsonObject, module: str) -> ChildSpec:
    """The process that keeps the engines on a cluster.   config: fields that all engines share.

    Raises RayMissing.
    """
    if importlib.util.find_spec("ray") is None:
        raise RayMissing
    if settings.storage is None:
        # The folder is made now, since nodes check that it exists before anything is stored.
        (settings.data_dir / "objects").mkdir(exist_ok=True)
    modules: dict[Kind, str] = {"engine": module, "retired": _RETIRED}
    path = settings.data_dir / "placer.json"
    write_private(
        path, asdict(PlacerConfig.of(settings, PoolKeys.of(secrets.pepper), config, modules))
    )
    own = placer_environment(environment(without=GATEWAY_ONLY))
    return ChildSpec("placer", placer_command(path), own, _PLACER_STOP_S, stage=1)


def _gpus_to_share(settings: Settings) -> list[str]:
    """GPUs to divide among the engines; empty where a single engine takes all it finds.

    Raises TooFewGpus.
    """
    if settings.most_engines == 1 or settings.device == "cpu":
        return []
    gpus, size = visible_gpus(os.environ), settings.tensor_parallel_size
    if gpus and len(gpus) < settings.most_engines * size:
        raise TooFewGpus(settings.most_engines, size, len(gpus))
    return gpus


def _gateway(settings: Settings, module: str) -> ChildSpec:
    command = (sys.executable, "-m", module, str(settings.data_dir / "gateway.json"))
    stop_timeout_s = 2 * settings.drain_timeout_s + _SETTLE_S
    return ChildSpec("gateway", command, environment(without=CLUSTER), stop_timeout_s, stage=2)


def _free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. The gateway binds it later; this only complains early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressInUse(host, port, error.strerror or str(error)) from None
        return int(probe.getsockname()[1])
