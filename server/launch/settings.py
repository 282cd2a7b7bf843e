"""Every setting of `chorale serve`, from flags, environment (CHORALE_...) and chorale.toml.

An unknown setting is an error, wherever it stands.
"""

import json
import os
import tomllib
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
"""A hold outlives its request's deadline, so that no clock difference lets it expire first."""
# Read by the client commands and by the supervisor, no settings of the server.
_OTHER_ENV = {
    "CHORALE_URL", "CHORALE_API_KEY", "CHORALE_ADMIN_KEY", "CHORALE_CONFIG", "CHORALE_PEPPER",
    "CHORALE_RECEIPT_SIGNING_KEY",
}  # fmt: skip


class UnknownSetting(Exception):
    """Where it stands, and its name."""


class InvalidSetting(Exception):
    """Which setting, and what it must be."""


def _default_threads(values: JsonObject) -> int:
    """One core is left to gateway and fetcher; all engines that may run share the others."""
    num_engines: int = values["max_engines"] or values["engines"]
    ranks: int = values["tensor_parallel_size"]
    return max(1, ((os.cpu_count() or 2) - 1) // (num_engines * ranks))


_Origin = Annotated[str, Field(pattern=r"^https?://[a-zA-Z0-9.:\[\]-]+$")]


class Settings(BaseModel):
    """Sizes in bytes, times in seconds; None is derived at start (see the field's comment)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    model_name: str | None = None  # what clients call the base model; the folder's or hub's name
    data_dir: Path = Path(".chorale")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    database_url: str | None = None  # SQLite in data_dir
    storage: str | None = None  # a folder in data_dir
    redis_url: str | None = None  # where several gateways count limits together
    redis_deadline_s: float = Field(0.05, gt=0)  # later than that, each counts a share by itself

    engines: int = Field(1, ge=1, le=MAX_ENGINES)
    # Above `engines`, the gateway chooses between the two by what is asked of them.
    max_engines: int | None = Field(None, ge=1, le=MAX_ENGINES)
    slo_first_token_s: float = Field(2.0, gt=0)  # that 9 of 10 first tokens should come within
    # An engine that is to go has so long for its requests, and until all of it is billed.
    leave_timeout_s: float = Field(150.0, gt=0)
    tensor_parallel_size: int = Field(1, ge=1, le=8)  # processes, or GPUs, of one engine
    ray: str | None = None  # address of a Ray cluster, where the engines run then
    # With ray: of the engines' journals, at this path on all nodes, the same for all gateways.
    pool_dir: Path | None = None  # data_dir

    max_model_len: int | None = Field(None, ge=16)  # the model's own, at most 8192
    max_num_seqs: int | None = Field(None, ge=1)  # by device, see engine/build.py
    max_num_batched_tokens: int | None = Field(None, ge=16)  # by device, see engine/build.py
    max_waiting: int = Field(1024, ge=1)
    max_sum_ranks_per_step: int | None = Field(None, ge=1)  # a tenth of the step's bytes
    max_skips: int = Field(64, ge=0)
    scheduling_policy: Literal["fcfs", "sjf", "vtc"] = "vtc"
    prefix_caching: bool = True
    # System messages and beginnings of prompts whose KV all tenants share on the base model.
    public_prompts: tuple[str, ...] = ()
    swap_bytes: int | None = Field(None, ge=0)  # by device, see engine/build.py
    block_size: int = Field(16, ge=16)
    arena_bytes: int | None = Field(None, ge=1 << 20)  # 1 GiB; on a GPU what is left of its memory
    memory_utilization: float = Field(0.9, gt=0, lt=1)  # of a GPU's memory
    quantization: Literal["fp8", "int8"] | None = None  # of the base's weights: GPU, CPU
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    batch_invariant: bool = False  # on a CPU: the same bits whoever else is there
    # For finding out what is wrong on a GPU; see engine/config.py.
    enforce_eager: bool = False
    lora_overlap: Literal["shrink", "none"] = "shrink"
    reference_kernels: tuple[str, ...] = ()
    threads: int = Field(default_factory=_default_threads, ge=1)  # of each process of an engine

    disk_cache_bytes: int = Field(10 << 30, ge=1 << 20)
    host_cache_bytes: int | None = Field(None, ge=1 << 20)  # by device, see engine/build.py
    prefetch_per_tenant: int = Field(4, ge=1)
    fetch_timeout_s: float = Field(60.0, gt=0)
    max_fetches: int = Field(8, ge=1, le=32)
    max_pinned_share: float = Field(0.5, ge=0, le=1)
    max_adapter_bytes: int = Field(2 << 30, ge=1 << 10)
    max_rank: int = Field(256, ge=1, le=256)
    max_versions: int = Field(100, ge=1)  # of one adapter
    max_uploads_per_hour: int = Field(1000, ge=1)  # of one tenant

    cached_token_weight: float = Field(1.0, ge=0, le=1)  # of one, against tokens_per_minute
    max_queue_share: float = Field(0.5, gt=0, le=1)  # of max_waiting, for one tenant

    request_timeout_s: float = Field(120.0, gt=0)
    first_token_timeout_s: float = Field(30.0, gt=0)
    max_body_bytes: int = Field(4 << 20, ge=1 << 10)
    drain_timeout_s: float = Field(30.0, ge=0)
    # Where webhooks may be sent to besides public addresses by https: for closed networks.
    webhook_allow_http: bool = False
    webhook_allow_private: bool = False
    max_connections: int = Field(4096, ge=1)  # of one gateway process
    cors_origins: tuple[_Origin, ...] = ()  # of pages elsewhere that may call this
    log_format: Literal["json", "text"] | None = None  # text on a terminal, else JSON

    @field_validator("public_prompts", "cors_origins", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        """A variable of the environment holds a JSON list."""
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None:
            parse_storage_url(value)
        return value

    @field_validator("max_engines")
    @classmethod
    def _check_max_engines(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("engines", 1):
            raise ValueError("there are more engines to begin with")
        return value

    @property
    def hold_lifetime_s(self) -> float:
        """From a hold to its expiry: past the request's deadline in the engine."""
        return self.request_timeout_s + _HOLD_SLACK_S

    @property
    def most_engines(self) -> int:
        """That may run at once."""
        return self.max_engines or self.engines

    @property
    def model_id(self) -> str:
        return self.model_name or Path(self.model).name

    @property
    def storage_url(self) -> str:
        return self.storage or (self.data_dir.resolve() / "objects").as_uri()


def load_settings(flags: JsonObject, config: Path | None = None) -> Settings:
    """Flags win over the environment, the environment over the file. None flags were not given.

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
