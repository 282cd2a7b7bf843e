"""Adapters, their versions, aliases and pins, as their tenant sees them."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue
from sqlalchemy import Connection

from engine.wire.messages import Tier
from registry.catalog import pins
from registry.catalog.adapter_rows import Adapter, Version, VersionState
from registry.catalog.alias_rows import Move, Target
from registry.catalog.catalog import Catalog
from registry.catalog.pins import Pin
from server.api.answer import Answer, ListAnswer
from server.billing.prices import Price, prices_for
from server.billing.rating import hourly_pin_nanousd, monthly_storage_nanousd
from server.database.clock import now_ms
from server.inference.bases import Bases
from server.text.json_object import JsonObject

_PASSPORT = {
    "lora_format": "lora", "rank": 16, "num_modules": 56, "size_bytes": 8_716_288, "warnings": [],
    "canary": {"verdict": "passed", "max_effect": 1.75}, "storage_nanousd_per_month": 5_000_000,
}  # fmt: skip
PassportFields = Annotated[dict[str, JsonValue], Field(examples=[_PASSPORT])]
"""An adapter's passport: the fields of `registry.checks.validate.Passport` and of the proof."""


class VersionAnswer(Answer):
    """A version of an adapter.

    digest: the SHA-256 of its stored object.   base_revision: of the base model it was made for.
    base_model: the name of the base model that serves it; null if none does now.
    tier: the place of its weights in the engines now.   created_at, deleted_at: in Unix seconds.
    response_template: the format of its tool calls, or a built-in format's name; null for the base
    model's.
    """

    version: int = Field(examples=[3])
    object: Literal["adapter.version"] = "adapter.version"
    digest: str = Field(
        examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    )
    base_revision: str = Field(
        examples=["60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"]
    )
    base_model: str | None = Field(examples=["base"])
    rank: int = Field(examples=[16])
    size_bytes: int = Field(examples=[8_716_288])
    state: VersionState
    tier: Tier
    is_servable: bool
    passport: PassportFields
    response_template: str | dict[str, JsonValue] | None = Field(examples=["hermes"])
    created_at: int = Field(examples=[1_798_761_600])
    deleted_at: int | None = Field(examples=[None])


class VersionList(ListAnswer[VersionAnswer]):
    """Versions of an adapter, newest first."""


class VersionDeleted(Answer):
    """The answer to the deletion of a version.   id: the adapter's name."""

    id: str = Field(examples=["my-adapter"])
    version: int = Field(examples=[3])
    object: Literal["adapter.version.deleted"] = "adapter.version.deleted"
    deleted: Literal[True] = True


class CanaryAnswer(Answer):
    """A version on trial.   percent: its share of the requests for the alias, 1 to 99."""

    version: int = Field(examples=[4])
    percent: int = Field(examples=[10])


class PinAnswer(Answer):
    """A pin.   since: of this version, in Unix seconds.   size_bytes: on the device."""

    since: int = Field(examples=[1_798_761_600])
    version: int = Field(examples=[3])
    size_bytes: int = Field(examples=[8_388_608])
    price_nanousd_per_hour: int = Field(examples=[20_000])


class AdapterAnswer(Answer):
    """An adapter.

    aliases: versions by alias.   canaries: only of those aliases that have one.   latest: the
    version of the alias `latest`, which the adapter's name means.
    """

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter"] = "adapter"
    adapter_id: str = Field(examples=["ad_5f1d7e84a9c04b6e8d23c0b9f6a71e35"])
    created_at: int = Field(examples=[1_798_761_600])
    aliases: dict[str, int] = Field(examples=[{"latest": 3, "production": 2}])
    canaries: dict[str, CanaryAnswer] = Field(
        examples=[{"production": {"version": 3, "percent": 10}}]
    )
    pin: PinAnswer | None
    latest: VersionAnswer | None


class AdapterList(ListAnswer[AdapterAnswer]):
    """The tenant's adapters, by name."""


class AdapterDeleted(Answer):
    """The answer to the deletion of an adapter."""

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: Literal[True] = True


class AliasMove(Answer):
    """A move of an alias.   version: null where the alias was removed.   moved_by: a key."""

    id: int = Field(examples=[7])
    object: Literal["alias.move"] = "alias.move"
    version: int | None = Field(examples=[3])
    canary: CanaryAnswer | None
    moved_at: int = Field(examples=[1_798_761_600])
    moved_by: str = Field(examples=["key:4Zk1rT8wQx2b"])


class AliasMoveList(ListAnswer[AliasMove]):
    """Moves of an alias, newest first."""


@dataclass(frozen=True, slots=True)
class AdapterView:
    """Renders adapters of the registry, with their place in the engines and today's prices."""

    catalog: Catalog
    bases: Bases

    def adapters(self, conn: Connection, found: list[Adapter]) -> list[AdapterAnswer]:
        """Adapters of one tenant."""
        if not found:
            return []
        tenant_id, ids = found[0].tenant_id, [adapter.adapter_id for adapter in found]
        prices = prices_for(conn, now_ms(), tenant_id=tenant_id, adapter_ids=ids)
        pinned = pins.find_pins(conn, tenant_id, ids)
        return [
            self._adapter(adapter, prices[adapter.adapter_id], pinned.get(adapter.adapter_id))
            for adapter in found
        ]

    def adapter(self, conn: Connection, adapter: Adapter) -> AdapterAnswer:
        return self.adapters(conn, [adapter])[0]

    def version(self, version: Version, price: Price) -> VersionAnswer:
        residency = self.bases.residency(version.object_key, version.base)
        base = self.catalog.bases.serving(version.base)
        return VersionAnswer.of_record(
            version,
            base_model=base.model_id if base else None,
            tier=residency.tier if residency else "remote",
            is_servable=base is not None,
            passport=passport_view(version.passport, version.size_bytes, price),
            response_template=json.loads(version.response_template or "null"),
        )

    def _adapter(self, adapter: Adapter, price: Price, pin: Pin | None) -> AdapterAnswer:
        canaries = {alias: _canary(target) for alias, target in adapter.aliases.items()}
        return AdapterAnswer.of_record(
            adapter,
            id=adapter.name,
            aliases={alias: target.version for alias, target in adapter.aliases.items()},
            canaries={alias: canary for alias, canary in canaries.items() if canary},
            pin=pin_view(pin, price) if pin else None,
            latest=self.version(adapter.latest, price) if adapter.latest else None,
        )


def passport_view(passport: JsonObject, size_bytes: int, price: Price) -> JsonObject:
    """A passport, with what storing its object for 30 days costs at today's price."""
    return {**passport, "storage_nanousd_per_month": monthly_storage_nanousd(size_bytes, price)}


def pin_view(pin: Pin, price: Price) -> PinAnswer:
    price_nanousd_per_hour = hourly_pin_nanousd(pin.size_bytes, price)
    since = pin.pinned_at_ms // 1000
    return PinAnswer.of_record(pin, since=since, price_nanousd_per_hour=price_nanousd_per_hour)


def move_view(move: Move) -> AliasMove:
    return AliasMove.of_record(
        move,
        id=move.move_id,
        version=move.target.version if move.target else None,
        canary=_canary(move.target) if move.target else None,
    )


def _canary(target: Target) -> CanaryAnswer | None:
    canary = target.canary
    return CanaryAnswer(version=canary.version, percent=canary.percent) if canary else None
