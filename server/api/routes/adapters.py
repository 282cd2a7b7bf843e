"""A tenant's adapters: list and search, versions, aliases and their past, delete and restore."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from registry.adapter_rows import Adapter, Version
from registry.alias_rows import Canary, Move, Target
from registry.catalog import Catalog
from registry.upload_rules import RegistryLimits, check_room
from registry.uploads import Uploads
from server.accounts.auth import Identity
from server.api.bodies import json_body
from server.api.deps import (
    AdaptersReadKey,
    AdaptersWriteKey,
    CatalogDep,
    DatabaseDep,
    EnginesDep,
    UploadsDep,
)
from server.api.routes.sharing import render_pins
from server.billing.prices import Price, price_for, prices_for
from server.billing.rating import monthly_storage_nanousd
from server.database.clock import now_ms
from server.database.database import Database
from server.pool.engines import Engines
from server.text.json_object import JsonObject

router = APIRouter(prefix="/adapters")

Limit = Annotated[int, Query(ge=1, le=1000)]
Search = Annotated[str, Query(max_length=64)]
# A larger number is no number of a database.
Before = Annotated[int | None, Query(ge=1, le=2**63 - 1)]


class _Canary(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int
    percent: int = Field(ge=0, le=100)


class _Alias(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int
    canary: _Canary | None = None


def limits_of(uploads: Uploads, identity: Identity) -> RegistryLimits:
    """What this tenant may have and upload."""
    return uploads.limits.of_tenant(identity.max_adapters, identity.max_adapter_bytes_total)


# ---- adapters ----


@router.get("")
async def list_adapters(
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersReadKey,
    after: Search | None = None,
    limit: Limit = 100,
    search: Search = "",
) -> JsonObject:
    """By name, those after the name `after` that have `search` in their name."""

    def read(conn: Connection) -> tuple[list[JsonObject], bool]:
        found = catalog.list_adapters(
            conn, identity.tenant_id, after=after, search=search, limit=limit + 1
        )
        return _adapters(catalog, engines, conn, found[:limit]), len(found) > limit

    data, has_more = await database.read(read)
    return {"object": "list", "data": data, "has_more": has_more}


@router.get("/{name}")
async def get_adapter(
    name: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersReadKey,
) -> JsonObject:
    return await database.read(
        lambda conn: _adapter(
            catalog, engines, conn, catalog.get_adapter(conn, identity.tenant_id, name)
        )
    )


@router.delete("/{name}")
async def delete_adapter(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> JsonObject:
    """With its versions and aliases; within the retention it can be restored."""
    await database.write(
        lambda conn: catalog.delete_adapter(conn, identity.tenant_id, name, actor=identity.actor)
    )
    return {"id": name, "object": "adapter.deleted", "deleted": True}


@router.post("/{name}/restore")
async def restore_adapter(
    name: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    uploads: UploadsDep,
    identity: AdaptersWriteKey,
) -> JsonObject:
    """Undo the deletion, but for its pin and grants."""

    def restore(conn: Connection) -> Adapter:
        adapter = catalog.restore_adapter(conn, identity.tenant_id, name, actor=identity.actor)
        check_room(conn, identity.tenant_id, name, limits_of(uploads, identity), now_ms())
        return adapter

    return await _changed(database, catalog, engines, restore)


# ---- versions ----


@router.get("/{name}/versions")
async def list_versions(
    name: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersReadKey,
    before: Before = None,
    limit: Limit = 100,
    include_deleted: bool = False,
) -> JsonObject:
    """Newest first; on request also those that were deleted, or purged after that."""

    def read(conn: Connection) -> tuple[list[JsonObject], bool]:
        found = catalog.list_versions(
            conn,
            identity.tenant_id,
            name,
            before=before,
            limit=limit + 1,
            include_deleted=include_deleted,
        )
        # All of one adapter; without any there is nothing to price.
        adapter_id = found[0].adapter_id if found else None
        price = price_for(conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=adapter_id)
        shown = [render_version(catalog, engines, version, price) for version in found[:limit]]
        return shown, len(found) > limit

    data, has_more = await database.read(read)
    return {"object": "list", "data": data, "has_more": has_more}


@router.delete("/{name}/versions/{version}")
async def delete_version(
    name: str, version: int, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> JsonObject:
    """A version that no alias means; within the retention it can be restored."""
    await database.write(
        lambda conn: catalog.delete_version(
            conn, identity.tenant_id, name, version, actor=identity.actor
        )
    )
    return {"id": name, "version": version, "object": "adapter.version.deleted", "deleted": True}


@router.post("/{name}/versions/{version}/restore")
async def restore_version(
    name: str,
    version: int,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    uploads: UploadsDep,
    identity: AdaptersWriteKey,
) -> JsonObject:
    def write(conn: Connection) -> JsonObject:
        restored = catalog.restore_version(
            conn, identity.tenant_id, name, version, actor=identity.actor
        )
        check_room(conn, identity.tenant_id, name, limits_of(uploads, identity), now_ms())
        price = price_for(
            conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=restored.adapter_id
        )
        return render_version(catalog, engines, restored, price)

    return await database.write(write)


# ---- aliases ----


@router.put("/{name}/aliases/{alias}")
async def set_alias(
    name: str,
    alias: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersWriteKey,
    body: Annotated[_Alias, json_body(_Alias)],
) -> JsonObject:
    """Let the alias mean a version; for some percent of the requests a canary version."""
    canary = Canary(**body.canary.model_dump()) if body.canary else None
    return await _changed(
        database,
        catalog,
        engines,
        lambda conn: catalog.set_alias(
            conn, identity.tenant_id, name, alias, body.version, canary, actor=identity.actor
        ),
    )


@router.post("/{name}/aliases/{alias}/rollback")
async def roll_back_alias(
    name: str,
    alias: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersWriteKey,
) -> JsonObject:
    """Let the alias mean what it meant before its last move; again undoes that."""
    return await _changed(
        database,
        catalog,
        engines,
        lambda conn: catalog.roll_back_alias(
            conn, identity.tenant_id, name, alias, actor=identity.actor
        ),
    )


@router.delete("/{name}/aliases/{alias}")
async def remove_alias(
    name: str,
    alias: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    engines: EnginesDep,
    identity: AdaptersWriteKey,
) -> JsonObject:
    """Any but `latest`."""
    return await _changed(
        database,
        catalog,
        engines,
        lambda conn: catalog.remove_alias(
            conn, identity.tenant_id, name, alias, actor=identity.actor
        ),
    )


@router.get("/{name}/aliases/{alias}/moves")
async def list_moves(
    name: str,
    alias: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    identity: AdaptersReadKey,
    before: Before = None,
    limit: Limit = 100,
) -> JsonObject:
    """Newest first, those before the move `before`."""
    found = await database.read(
        lambda conn: catalog.list_moves(
            conn, identity.tenant_id, name, alias, before=before, limit=limit + 1
        )
    )
    data = [_move(move) for move in found[:limit]]
    return {"object": "list", "data": data, "has_more": len(found) > limit}


# ---- rendering ----


async def _changed(
    database: Database, catalog: Catalog, engines: Engines, change: Callable[[Connection], Adapter]
) -> JsonObject:
    """The adapter after a change, as it was in the change's own transaction."""
    return await database.write(lambda conn: _adapter(catalog, engines, conn, change(conn)))


def _adapters(
    catalog: Catalog, engines: Engines, conn: Connection, found: list[Adapter]
) -> list[JsonObject]:
    """Of one tenant. canaries: only of the aliases that have one."""
    if not found:
        return []
    ids = [adapter.adapter_id for adapter in found]
    prices = prices_for(conn, now_ms(), tenant_id=found[0].tenant_id, adapter_ids=ids)
    pins = render_pins(conn, found[0].tenant_id, prices)
    return [
        {
            "id": adapter.name,
            "object": "adapter",
            "adapter_id": adapter.adapter_id,
            "created_at": adapter.created_at_ms // 1000,
            "aliases": {alias: target.version for alias, target in adapter.aliases.items()},
            "canaries": {
                alias: canary
                for alias, target in adapter.aliases.items()
                if (canary := _canary(target))
            },
            "pin": pins.get(adapter.adapter_id),
            "latest": adapter.latest
            and render_version(catalog, engines, adapter.latest, prices[adapter.adapter_id]),
        }
        for adapter in found
    ]


def _adapter(catalog: Catalog, engines: Engines, conn: Connection, adapter: Adapter) -> JsonObject:
    return _adapters(catalog, engines, conn, [adapter])[0]


def _canary(target: Target) -> dict[str, int] | None:
    canary = target.canary
    return {"version": canary.version, "percent": canary.percent} if canary else None


def _move(move: Move) -> JsonObject:
    """version: null where the alias was removed."""
    return {
        "id": move.move_id,
        "object": "alias.move",
        "version": move.target.version if move.target else None,
        "canary": _canary(move.target) if move.target else None,
        "moved_at": move.moved_at_ms // 1000,
        "moved_by": move.moved_by,
    }


def render_version(
    catalog: Catalog, engines: Engines, version: Version, price: Price
) -> JsonObject:
    """A version as its tenant sees it. tier: where its weights are in the engine now."""
    residency = engines.residency(version.object_key)
    return {
        "version": version.version,
        "object": "adapter.version",
        "digest": version.digest,
        "base_revision": version.base_revision,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "state": version.state,
        "tier": residency.tier if residency else "remote",
        "is_servable": catalog.is_servable(version),
        "passport": render_passport(version.passport, version.size_bytes, price),
        "created_at": version.created_at_ms // 1000,
        "deleted_at": None if version.deleted_at_ms is None else version.deleted_at_ms // 1000,
    }


def render_passport(passport: JsonObject, size_bytes: int, price: Price) -> JsonObject:
    """With what its object costs today, in 30 days."""
    return {**passport, "storage_nanousd_per_month": monthly_storage_nanousd(size_bytes, price)}
