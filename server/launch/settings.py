"""Every setting of `chorale serve`, from flags, environment (CHORALE_...) and chorale.toml.

An unknown setting is an error in each of the three.
"""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Collection
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from registry.storage.url import parse_storage_url
from server.launch.model_settings import MODEL_FIELDS, ModelSettings, parse_list
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


class InvalidSetting(Exception):
    """A setting that does not exist, or has a value that it cannot have; the message says which."""


_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
# Browsers leave the scheme's own port out.
_ORIGIN = re.compile(
    r"(http(?!.*:80$)|https(?!.*:443$))://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)


class Settings(ModelSettings, frozen=True):
    """The settings, in bytes and seconds where they are sizes and times.

    Those of `ModelSettings` hold for every base model that has no setting of its own.
    """

    # Base models, where there are several: for each a table of those settings that are its own,
    # with `model` among them. In chorale.toml each is written as a table [[models]].
    models: tuple[JsonObject, ...] = ()
    data_dir: Path = Path(".chorale")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    database_url: str | None = None
    storage: str | None = None
    redis_url: str | None = None
    # Seconds that one call to Redis may take; after a slower one, each gateway counts its own share
    # of the limits.
    redis_deadline_s: float = Field(0.05, gt=0)
    ray: str | None = None
    # Folder, with ray, for the engines' journals and for uploads that are being proved, which all
    # nodes and all gateways reach at this path.
    pool_dir: Path | None = None  # default: data_dir

    # Most bytes of the weights file (adapter_model.safetensors) of an uploaded adapter.
    max_adapter_bytes: int = Field(2 << 30, ge=1 << 10)
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
    # Most open connections of each gateway process. A new one over the limit takes the place of the
    # one whose last request is longest ago, of those on which no key was shown, or gets a 503.
    max_connections: int = Field(4096, ge=1)
    # Most open connections of each gateway process from one address, or from one /64 network of
    # IPv6; more get a 503.
    max_connections_per_address: int = Field(256, ge=1)
    # Addresses and networks of proxies, from which as many connections may come as there are.
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1")
    # Addresses and networks that may read GET /metrics, which tells of all tenants; whom a proxy
    # names in X-Forwarded-For must be of them, too. The admin key may read it from anywhere.
    metrics_networks: tuple[str, ...] = ("127.0.0.0/8", "::1")
    # Origins, such as https://app.example.com, whose web pages may call this server from a browser.
    cors_origins: tuple[str, ...] = ()
    # Days after which lines of the audit log are deleted. By default they are kept for good.
    audit_log_retention_days: int | None = Field(None, ge=1)
    # Names under which GET /metrics has some figures once more: vllm, those of vLLM, for routers
    # and dashboards that were made for it.
    metrics_aliases: Literal["", "vllm"] = ""
    # Format of the log lines of all processes; on other nodes of a cluster they are always JSON.
    log_format: Literal["json", "text"] | None = None  # default: text on a terminal, else json
    # Least level of the gateway's log lines; debug adds those of probes and scrapes.
    log_level: Literal["debug", "info"] = "info"
    # Base URL of a collector of OpenTelemetry, such as http://localhost:4318, which gets a trace of
    # each inference request as OTLP over HTTP. It needs the extra otel. Unset, there are no traces.
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://[^\s/]")
    # Share of the inference requests that are traced; a request whose caller sends a traceparent is
    # traced if the caller's span is.
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)

    _parse_models = field_validator("models", mode="before")(parse_list)

    @field_validator("cors_origins", "metrics_networks", "trusted_proxies", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return [it.strip() for it in value.split(",")] if isinstance(value, str) else value

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None:
            parse_storage_url(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers send it: write scheme, host and any odd "
                    "port in small letters, without a path, such as https://app.example.com"
                )
        return value

    @field_validator("metrics_networks", "trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @model_validator(mode="after")
    def _check_models(self) -> "Settings":
        if bool(self.model) == bool(self.models):
            raise ValueError("give either `model`, or a table [[models]] for each of several")
        if self.models and self.model_name is not None:
            raise ValueError("model_name is one model's: give it in the model's table [[models]]")
        return self

    @model_validator(mode="after")
    def _check_gateways(self) -> "Settings":
        if self.gateways > 1 and (self.database_url or "sqlite").startswith("sqlite"):
            raise ValueError(
                "database_url: SQLite serves one gateway; for several, set it to postgresql://..."
            )
        if self.gateways > 1 and self.redis_url is None:
            raise ValueError(
                "redis_url: several gateways count their limits together in Redis; set it to "
                "redis://..."
            )
        return self

    @property
    def hold_lifetime_s(self) -> float:
        """Seconds from a hold to its expiry, which is past the request's deadline in the engine."""
        return self.request_timeout_s + _HOLD_SLACK_S

    @property
    def storage_url(self) -> str:
        return self.storage or (self.data_dir.resolve() / "objects").as_uri()

    def of_models(self, where: str = "the settings") -> "tuple[Settings, ...]":
        """The settings of each base model, with `models` empty.   where: source of `models`.

        Raises InvalidSetting, which names the table and the setting.
        """
        if not self.models:
            return (self,)
        found = [self.of_table(t, f"models.{k}.", where) for k, t in enumerate(self.models)]
        names = Counter(one.model_id for one in found)
        for number, one in enumerate(found):
            if names[one.model_id] > 1:
                raise InvalidSetting(
                    f"models.{number}.model_name: {names[one.model_id]} models are called "
                    f"{one.model_id}; give each a name of its own"
                )
        return tuple(found)

    def common_with(self, table: JsonObject) -> JsonObject:
        """A model's table over what is given for all models."""
        return self._given(MODEL_FIELDS - {"model"}) | table

    def of_table(self, table: JsonObject, path: str = "", where: str = "the table") -> "Settings":
        """The settings of a base model with a table of its own, which wins.

        path: the table's place, for messages.   where: the table's source. Raises
        InvalidSetting.
        """
        for name in table.keys() - MODEL_FIELDS:
            raise InvalidSetting(f"{path}{name} in {where} is no setting of a model")
        if not table.get("model"):
            raise InvalidSetting(f"{path}model: give the model's folder or its hub id")
        common = self._given(type(self).model_fields.keys() - {"model", "models"})
        found = _validated(common | table, path)
        if not _MODEL_NAME.fullmatch(found.model_id):
            raise InvalidSetting(
                f"{path}model_name: {found.model_id!r} cannot be a model's name; give one of "
                "letters, digits and . _ : / -, 64 at most"
            )
        return found

    def of_base(self, dumped: JsonObject) -> "Settings":
        """The settings of one base model as `dump_base` wrote them, beside those for all."""
        return _validated({name: getattr(self, name) for name in fixed_settings()} | dumped)

    def dump_base(self) -> JsonObject:
        """The settings that each base model may have for itself; no secret is among them."""
        return self.model_dump(mode="json", include=MODEL_FIELDS)

    def with_models_of(self, other: "Settings") -> "Settings":
        """Make settings from these with the base models of others."""
        models = {*MODEL_FIELDS, "models"}
        return _validated(self._given(fixed_settings()) | other._given(models))

    def _given(self, names: Collection[str]) -> JsonObject:
        """The settings among `names` that are not left at their defaults."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


def fixed_settings() -> list[str]:
    """Names of the settings that hold for all base models, until the end of `chorale serve`."""
    return sorted(Settings.model_fields.keys() - MODEL_FIELDS - {"models"})


def load_settings(flags: JsonObject, config: Path | None = None) -> Settings:
    """Merge the three sources: flags win over the environment, the environment over the file.

    flags: None for each that was not given. The base models are those of one source.

    Raises InvalidSetting.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    sources = {str(config): _from_file(config), "the environment": _from_environment()}
    values: JsonObject = {}
    named_in = ""
    for where, source in (sources | {"the flags": given}).items():
        if source.keys() & {"model", "models"}:
            values = {name: values[name] for name in values.keys() - {"model", "models"}}
            named_in = where
        values |= source
    settings = _validated(values)
    settings.of_models(named_in)
    return settings


def _validated(values: JsonObject, path: str = "") -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidSetting(f"{path}{name}: {message}" if name else message) from None


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
            raise InvalidSetting(f"{shown} in {where} is no setting of chorale serve")
