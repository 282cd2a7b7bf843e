"""Every setting of `chorale serve`, from flags, environment (CHORALE_...) and chorale.toml.

An unknown setting is an error in each of the three.
"""

import json
import os
import tomllib
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from registry.storage_url import parse_storage_url
from server.pool.files import MAX_ENGINES
from server.text.json_object import JsonObject

ENV_PREFIX = "CHORALE_"
_HOLD_SLACK_S = 60.0
"""Seconds that a hold outlives its request's deadline: clocks differ, and it must not expire first.
"""
# Variables that the client commands and the supervisor read; they are no settings of the server.
_OTHER_ENV = {
    "CHORALE_URL", "CHORALE_API_KEY", "CHORALE_ADMIN_KEY", "CHORALE_CONFIG", "CHORALE_PEPPER",
    "CHORALE_RECEIPT_SIGNING_KEY",
}  # fmt: skip


class UnknownSetting(Exception):
    """A setting that does not exist; the message names it and where it stands."""


class InvalidSetting(Exception):
    """A setting with a value that it cannot have; the message says which values it may have."""


def _default_threads(values: JsonObject) -> int:
    """All cores but one, divided among the processes of all engines that may run.

    The one core is left to the gateway and the fetcher.
    """
    num_engines: int = values["max_engines"] or values["engines"]
    ranks: int = values["tensor_parallel_size"]
    return max(1, ((os.cpu_count() or 2) - 1) // (num_engines * ranks))


_Origin = Annotated[str, Field(pattern=r"^https?://[a-zA-Z0-9.:\[\]-]+$")]


class Settings(BaseModel):
    """The settings, in bytes and seconds where they are sizes and times.

    The comment above a field describes it, and the comment behind a field says what None means.
    Fields without a comment are flags, which server/cli/serve.py describes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    model_name: str | None = None
    data_dir: Path = Path(".chorale")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    database_url: str | None = None
    storage: str | None = None
    redis_url: str | None = None
    # Seconds that one call to Redis may take; after a slower one, each gateway counts its own share
    # of the limits.
    redis_deadline_s: float = Field(0.05, gt=0)

    engines: int = Field(1, ge=1, le=MAX_ENGINES)
    max_engines: int | None = Field(None, ge=1, le=MAX_ENGINES)
    # Seconds within which 9 of 10 first tokens should come; where they come later, another engine
    # is started, up to max_engines.
    slo_first_token_s: float = Field(2.0, gt=0)
    # Seconds that an engine which leaves the pool has to end its requests and to have all of them
    # billed; then it is killed.
    leave_timeout_s: float = Field(150.0, gt=0)
    tensor_parallel_size: int = Field(1, ge=1, le=8)
    ray: str | None = None
    # Folder, with ray, for the engines' journals and for uploads that are being proved, which all
    # nodes and all gateways reach at this path.
    pool_dir: Path | None = None  # default: data_dir

    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int | None = Field(None, ge=1)
    # Most tokens that one step of an engine computes, those of prompts and of answers together;
    # longer prompts are computed in chunks.
    max_num_batched_tokens: int | None = Field(None, ge=16)  # default: 128 on a CPU, 2048 on a GPU
    # Most answers that wait in the queue of one engine; a request beyond them is refused with 503.
    max_waiting: int = Field(1024, ge=1)
    # Highest sum of the ranks of the distinct adapters in one step of an engine; a single adapter
    # with a larger rank runs alone. By default as many ranks as take a tenth of the bytes of the
    # base model's weights, and at least 256.
    max_sum_ranks_per_step: int | None = Field(None, ge=1)
    # How often later requests may start before a request that waits for free memory in the arena;
    # then none behind it starts before it does.
    max_skips: int = Field(64, ge=0)
    # Choice of the waiting request that starts next: vtc, one of the tenant that was served least
    # so far; fcfs, the one that came first; sjf, the one with the shortest expected answer.
    scheduling_policy: Literal["fcfs", "sjf", "vtc"] = "vtc"
    # Whether the KV of prompts and answers is kept and used again for prompts of the same tenant
    # and adapter that begin alike.
    prefix_caching: bool = True
    # System messages and prompt prefixes whose KV all tenants share on the base model.
    public_prompts: tuple[str, ...] = ()
    # Bytes of host memory that each process of an engine has for the KV of preempted requests.
    swap_bytes: int | None = Field(None, ge=0)  # default: 256 MiB on a CPU, 4 GiB beside a GPU
    # Tokens in a block of KV; the engine doubles it until a block has room for the parts that
    # adapters are stored in.
    block_size: int = Field(16, ge=16)
    arena_bytes: int | None = Field(None, ge=1 << 20)
    memory_utilization: float = Field(0.9, gt=0, lt=1)
    quantization: Literal["fp8", "int8", "int4"] | None = None
    # Folder of the model from which a quantised checkpoint was made. With it, an adapter's passport
    # tells how far the quantised base moves its answers.
    unquantized_model: Path | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    batch_invariant: bool = False
    speculation: Literal["auto", "off"] = "auto"
    # Bytes of host memory that an engine has for pools of drafts, which are for requests whose
    # speculation is shared; one tenant has a sixteenth of them at most. 0 keeps no pools.
    draft_pool_bytes: int = Field(64 << 20, ge=0)
    # Folder of a smaller model with the same vocabulary, which drafts where texts do not; for one
    # rank on a CPU.
    draft_model: Path | None = None
    # Whether a GPU's kernels are launched one by one, without CUDA graphs: slower, to track down
    # errors.
    enforce_eager: bool = False
    # Time at which a GPU multiplies by an adapter's A matrix: shrink, beside the base model's
    # product; none, before it, to track down errors.
    lora_overlap: Literal["shrink", "none"] = "shrink"
    # Names of GPU kernels, as in kernels/reference.py, that plain torch replaces: slow and without
    # CUDA graphs, to track down errors.
    reference_kernels: tuple[str, ...] = ()
    threads: int = Field(default_factory=_default_threads, ge=1)

    # Most bytes of packed adapters on the local disk, those being written included.
    disk_cache_bytes: int = Field(10 << 30, ge=1 << 20)
    # Most bytes of packed adapters in the host memory beside a GPU, pinned at start; an adapter
    # that is larger is refused. A CPU needs none.
    host_cache_bytes: int | None = Field(None, ge=1 << 20)  # default: 4 GiB, 256 MiB on a CPU
    # Most adapters of one tenant that are loaded at a time before the engine has their requests.
    prefetch_per_tenant: int = Field(4, ge=1)
    # Seconds that it may take to bring one adapter from the object store to the local disk.
    fetch_timeout_s: float = Field(60.0, gt=0)
    # Most adapters that a machine brings from the object store at a time, for all its engines.
    max_fetches: int = Field(8, ge=1, le=32)
    # Share of an engine's arena that pinned adapters may take.
    max_pinned_share: float = Field(0.5, ge=0, le=1)
    # Most bytes of the weights file (adapter_model.safetensors) of an uploaded adapter.
    max_adapter_bytes: int = Field(2 << 30, ge=1 << 10)
    # Whether an engine with a damaged line in its journal sets that segment aside and serves, or
    # stops. By default it serves: only that line is lost, at most the end of one request, which
    # `chorale audit` finds, while to stop would cost all tenants the service.
    damaged_journal: Literal["set_aside", "stop"] = "set_aside"
    # Bytes that stay free on each volume for the ledger and the journals: uploads, the disk cache,
    # exports and logs do not take them. By default 1 GiB, or a quarter of a smaller volume.
    disk_reserve_bytes: int | None = Field(None, ge=0)
    # Folder for uploads while they are received and checked, and for exports while they are made;
    # it may lie on another volume than data_dir.
    spool_dir: Path | None = None  # default: data_dir
    # Most bytes that the parts of all unfinished uploads take in the object store. By default
    # 64 GiB, or a quarter of the volume of a store that is a folder, if that is less.
    max_pending_bytes: int | None = Field(None, ge=1 << 20)
    # Share of max_pending_bytes that the unfinished uploads of one tenant may take.
    max_pending_share: float = Field(0.25, gt=0, le=1)
    # Highest rank that an uploaded adapter may have.
    max_rank: int = Field(256, ge=1, le=256)
    # Most versions of one adapter, unfinished uploads included.
    max_versions: int = Field(100, ge=1)
    # Most uploads that one tenant may begin within an hour.
    max_uploads_per_hour: int = Field(1000, ge=1)

    # How much a prompt token that the prefix cache had counts against tokens_per_minute: 1, as much
    # as any other; 0, nothing.
    cached_token_weight: float = Field(1.0, ge=0, le=1)
    # Share of the engines' queues (max_waiting each), of the room that other tenants leave in them,
    # that a tenant without a share of its own may hold.
    max_queue_share: float = Field(0.5, gt=0, le=1)

    # Seconds that the engine has for a request; then the request ends with the tokens it has.
    request_timeout_s: float = Field(120.0, gt=0)
    # Seconds in which the engine must have a request's first token; otherwise the request ends with
    # 503 and costs nothing.
    first_token_timeout_s: float = Field(30.0, gt=0)
    # Most bytes in the body of an inference request; a longer body is refused.
    max_body_bytes: int = Field(4 << 20, ge=1 << 10)
    # Size in bytes of which every event of a stream has a multiple, so that who sees the encrypted
    # stream cannot tell how many tokens an event has. 0 pads nothing, except for clients that send
    # stream_options.include_obfuscation: they get multiples of 512.
    pad_events_to: int = Field(0, ge=0, le=1 << 16)
    # Seconds that a stopping gateway gives its requests. After four fifths of them it ends those
    # that still run, with the tokens that they have.
    drain_timeout_s: float = Field(30.0, ge=0)
    # Whether webhooks may go to http:// URLs as well, not only to https://; for closed networks.
    webhook_allow_http: bool = False
    # Whether webhooks may go to addresses that are not public as well; for closed networks.
    webhook_allow_private: bool = False
    # Most open connections of one gateway process. A new one over the limit takes the place of the
    # one that has waited longest for a request, of those on which no key was shown, or gets a 503.
    max_connections: int = Field(4096, ge=1)
    # Most open connections from one address, or from one /64 network of IPv6; more get a 503.
    max_connections_per_address: int = Field(256, ge=1)
    # Addresses and networks of proxies, from which as many connections may come as there are.
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1")
    # Origins, such as https://app.example.com, whose web pages may call this server from a browser.
    cors_origins: tuple[_Origin, ...] = ()
    # Format of the log lines of all processes; on other nodes of a cluster they are always JSON.
    log_format: Literal["json", "text"] | None = None  # default: text on a terminal, else json
    # Least level of the gateway's log lines; debug adds those of probes and scrapes.
    log_level: Literal["debug", "info"] = "info"

    @field_validator("public_prompts", "cors_origins", "trusted_proxies", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        """Decode the JSON list that an environment variable holds."""
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None:
            parse_storage_url(value)
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_trusted_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("max_engines")
    @classmethod
    def _check_max_engines(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("engines", 1):
            raise ValueError("must be at least `engines`")
        return value

    @property
    def hold_lifetime_s(self) -> float:
        """Seconds from a hold to its expiry, which is past the request's deadline in the engine."""
        return self.request_timeout_s + _HOLD_SLACK_S

    @property
    def most_engines(self) -> int:
        """How many engines may run at once."""
        return self.max_engines or self.engines

    @property
    def model_id(self) -> str:
        return self.model_name or Path(self.model).name

    @property
    def storage_url(self) -> str:
        return self.storage or (self.data_dir.resolve() / "objects").as_uri()


def load_settings(flags: JsonObject, config: Path | None = None) -> Settings:
    """Merge the three sources: flags win over the environment, the environment over the file.

    flags: None for each that was not given.

    Raises UnknownSetting and InvalidSetting.
    """
    values = _from_file(config) | _from_environment()
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidSetting(f"{name}: {first['msg']}") from None


def _from_file(path: Path | None) -> JsonObject:
    if path is None:
        return {}
    values = tomllib.loads(path.read_text())
    _refuse_unknown(values, str(path))
    return values


def _from_environment() -> JsonObject:
    values = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and name not in _OTHER_ENV
    }
    _refuse_unknown(values, "the environment", ENV_PREFIX)
    return values


def _refuse_unknown(values: JsonObject, where: str, prefix: str = "") -> None:
    for name in values:
        if name not in Settings.model_fields:
            shown = prefix + (name.upper() if prefix else name)
            raise UnknownSetting(f"{shown} in {where} is no setting of chorale serve")
