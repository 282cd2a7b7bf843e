"""From settings to the three processes of `chorale serve`: what each is given, and nothing more.

    fetcher   python -m lora.fetch    object store to disk; has the store's credentials
    engine    python -m engine        has the model; no credentials, no database
    gateway   python -m server        HTTP; has the database, the store and the admin key

ServeError
├── ModelNotFound         neither a folder nor a model that the hub would give
├── ModelNotServed        it is there, and cannot be served as it is
├── AddressInUse          something else listens there
└── DataDirTooLong        Unix sockets lie in it, and their paths have a limit
"""

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.wire import write_vocabulary
from registry.base_model import BaseModel
from registry.errors import UnsupportedBaseModel
from server.secrets_store import Secrets
from server.settings import Settings
from server.supervisor import ChildSpec
from server.tokenizer import TemplateError, Tokenizer, UnsupportedTokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_MAX_SOCKET_PATH = 100
"""Linux has room for 107 bytes."""
_SETTLE_S = 10.0
"""What a gateway may take after the drain: the last journal records are read and posted."""

# Of the environment, what only some of the processes may see.
_STORE_CREDENTIALS = ("AWS_",)
_GATEWAY_ONLY = ("CHORALE_", "PG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_")


class ServeError(Exception):
    """Why nothing was started; str() is for the operator."""


class ModelNotFound(ServeError):
    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        super().__init__(f"There is no model {model!r}: {reason}.")


class ModelNotServed(ServeError):
    pass


class AddressInUse(ServeError):
    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"Cannot listen on {host}:{port} ({reason}); choose another --port.")


class DataDirTooLong(ServeError):
    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            f"The path {data_dir} is too long for the sockets in it; choose a shorter --data-dir."
        )


def settle_settings(settings: Settings) -> Settings:
    """The same with an absolute data directory, which is made, and a port that is free now.

    Raises AddressInUse, DataDirTooLong.
    """
    data_dir = settings.data_dir.expanduser().resolve()
    if len(os.fsencode(data_dir / "engine" / "engine.sock")) > _MAX_SOCKET_PATH:
        raise DataDirTooLong(data_dir)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = _free_port(settings.host, settings.port)
    return settings.model_copy(update={"data_dir": data_dir, "port": port})


def prepare(
    settings: Settings,
    *,
    engine_module: str = "engine",
    gateway_module: str = "server",
) -> list[ChildSpec]:
    """Write what the processes read at start; the processes, in the order of their start.

    settings: of `settle_settings`. The modules are replaced in tests. Raises ServeError,
    SecretError.
    """
    data_dir = settings.data_dir
    Secrets.load(data_dir, may_make=not _shares(settings))
    model_dir = find_model(settings.model)
    try:
        base = BaseModel.load(model_dir, settings.model_id, data_dir / "cache")
        tokenizer = Tokenizer(model_dir)
    except (UnsupportedBaseModel, UnsupportedTokenizer) as error:
        raise ModelNotServed(str(error)) from error
    _check_length(settings, base)
    (data_dir / "engine").mkdir(exist_ok=True)
    write_vocabulary(data_dir / "engine" / "vocabulary", tokenizer.vocabulary)
    engine_config = _engine_config(settings, base, tokenizer)
    write_private(data_dir / "engine.json", engine_config)
    gateway_config = {"settings": settings.model_dump(mode="json"), "model_dir": str(model_dir)}
    write_private(data_dir / "gateway.json", gateway_config)
    return [
        _fetcher(settings),
        _engine(settings, engine_module),
        _gateway(settings, gateway_module),
    ]


def _shares(settings: Settings) -> bool:
    """Whether there may be other gateways, which need the same secrets."""
    url = settings.database_url or "sqlite"
    return settings.redis_url is not None or not url.startswith("sqlite")


def find_model(model: str) -> Path:
    """The folder of a model: itself, or downloaded from the hub. Raises ModelNotFound."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(model, "no such folder, and no hub id either")
    # Only here: its import takes longer than all the rest of a start from a folder.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        reason = f"no such folder, and the hub does not give it ({first_line})"
        raise ModelNotFound(model, reason) from error


def write_private(path: Path, content: dict[str, Any]) -> None:
    """JSON that may hold keys and passwords, with mode 0600."""
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=2)
    draft.rename(path)


def _check_length(settings: Settings, base: BaseModel) -> None:
    longest = base.config.get("max_position_embeddings")
    if settings.max_model_len and longest and settings.max_model_len > longest:
        raise ModelNotServed(
            f"max_model_len is {settings.max_model_len}; {base.model_id} was made for {longest}."
        )


def _engine_config(settings: Settings, base: BaseModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of engine.config.EngineConfig, by name: the file is the interface."""
    data_dir = settings.data_dir
    same = (
        "device", "dtype", "quantization", "kv_cache_dtype", "batch_invariant", "arena_bytes",
        "memory_utilization", "threads", "max_model_len", "block_size", "max_num_seqs",
        "max_num_batched_tokens", "max_waiting", "max_sum_ranks_per_step", "max_skips",
        "scheduling_policy", "prefix_caching", "swap_bytes", "disk_cache_bytes",
        "host_cache_bytes", "prefetch_per_tenant", "fetch_timeout_s", "max_fetches",
        "max_pinned_share",
    )  # fmt: skip
    return {
        "data_dir": str(data_dir / "engine"),
        "model_dir": str(base.path),
        "base_revision": base.base_revision,
        "vocabulary_path": str(data_dir / "engine" / "vocabulary"),
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "public_prefixes": _public_prefixes(settings.public_prompts, tokenizer),
        "adapter_cache_dir": str(data_dir / "cache" / "adapters"),
        "fetcher_socket": str(data_dir / "engine" / "fetch.sock"),
        **{name: getattr(settings, name) for name in same},
    }


def _public_prefixes(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each text as the beginning of a prompt, and as a chat's system message."""
    prefixes = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt in prompts:
        # Where two chats with the same system message part, the system message is over.
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
    )


def fetcher_child(
    *, socket: Path, storage: str, cache: Path, quota_bytes: int, max_fetches: int
) -> ChildSpec:
    """With the store's credentials, of all there is in the environment."""
    command = (
        sys.executable, "-m", "lora.fetch", "--socket", str(socket), "--storage", storage,
        "--cache", str(cache), "--quota-bytes", str(quota_bytes), "--max-fetches", str(max_fetches),
    )  # fmt: skip
    return ChildSpec("fetcher", command, _environment(without=_GATEWAY_ONLY))


def _engine(settings: Settings, module: str) -> ChildSpec:
    return engine_child("engine", module, settings.data_dir / "engine.json", settings.threads)


def engine_child(name: str, module: str, config_path: Path, threads: int) -> ChildSpec:
    """Without credentials."""
    command = (sys.executable, "-m", module, str(config_path))
    environment = _environment(without=(*_GATEWAY_ONLY, *_STORE_CREDENTIALS))
    environment["OMP_NUM_THREADS"] = str(threads)
    return ChildSpec(name, command, environment)


def _gateway(settings: Settings, module: str) -> ChildSpec:
    command = (sys.executable, "-m", module, str(settings.data_dir / "gateway.json"))
    stop_timeout_s = 2 * settings.drain_timeout_s + _SETTLE_S
    return ChildSpec("gateway", command, _environment(without=()), stop_timeout_s)


def _environment(without: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(without)}


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
