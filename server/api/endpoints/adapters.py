"""A tenant's adapters: list and search, versions, aliases and their history, delete and restore."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query
from pydantic import Field
from sqlalchemy import Connection

from registry.catalog.adapter_rows import Adapter
from registry.catalog.alias_rows import Canary
from registry.uploads.rows import unfinished_uploads
from registry.uploads.rules import RegistryLimits, check_room
from server.accounts.auth import Identity
from server.api.adapter_view import (
    AdapterAnswer,
    AdapterDeleted,
    AdapterList,
    AdapterView,
    AliasMoveList,
    VersionAnswer,
    VersionDeleted,
    VersionList,
    move_view,
)
from server.api.bodies import BodyFields, json_body
from server.api.deps import (
    AdaptersReadKey,
    AdaptersWriteKey,
    AdapterViewDep,
    CatalogDep,
    DatabaseDep,
    RegistryLimitsDep,
    tenants_router,
)
from server.billing.prices import price_of_adapter
from server.database.clock import now_ms
from server.database.database import Database
from server.inference.routes import refuse_name_of_route

router = tenants_router("/adapters")

Limit = Annotated[int, Query(ge=1, le=1000)]
Search = Annotated[str, Query(max_length=64)]
# The largest integer of a database.
Before = Annotated[int | None, Query(ge=1, le=2**63 - 1)]


class _Canary(BodyFields):
    """A version on trial. version: the number of the version.   percent: its share of requests."""

    version: int
    percent: int = Field(ge=0, le=100)


class _Alias(BodyFields):
    """The meaning of an alias.

    version: the number of the version that answers.
    canary: a second version that gets a part of the requests; null for none.
    """

    version: int
    canary: _Canary | None = None


def limits_of(limits: RegistryLimits, identity: Identity) -> RegistryLimits:
    """The limits on what this tenant may store and upload, given the operator's."""
    return limits.of_tenant(identity.max_adapters, identity.max_adapter_bytes_total)


def _check_room(conn: Connection, name: str, limits: RegistryLimits, identity: Identity) -> None:
    """Raise QuotaExceeded unless there is room for what was restored."""
    unfinished = unfinished_uploads(conn, identity.tenant_id, now_ms())
    check_room(conn, identity.tenant_id, name, limits_of(limits, identity), unfinished)


# ---- adapters ----


@router.get("")
async def list_adapters(
    database: DatabaseDep,
    view: AdapterViewDep,
    identity: AdaptersReadKey,
    after: Search | None = None,
    limit: Limit = 100,
    search: Search = "",
) -> AdapterList:
    """List the tenant's adapters by name.

    after: only names after this one.   search: only names that contain this text.
    """

    def read(conn: Connection) -> AdapterList:
        found = view.catalog.list_adapters(
            conn, identity.tenant_id, after=after, search=search, limit=limit + 1
        )
        data = view.adapters(conn, found[:limit])
        return AdapterList(data=data, has_more=len(found) > limit)

    return await database.read(read)


@router.get("/{name}")
async def get_adapter(
    name: str,
    database: DatabaseDep,
    view: AdapterViewDep,
    identity: AdaptersReadKey,
) -> AdapterAnswer:
    """Get an adapter with its aliases, its pin and its latest version."""
    return await database.read(
        lambda conn: view.adapter(conn, view.catalog.get_adapter(conn, identity.tenant_id, name))
    )


@router.delete("/{name}")
async def delete_adapter(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> AdapterDeleted:
    """Delete an adapter with its versions and aliases; it can be restored for a time."""
    await database.write(
        lambda conn: catalog.delete_adapter(conn, identity.tenant_id, name, actor=identity.actor)
    )
    return AdapterDeleted(id=name)


@router.post("/{name}/restore")
async def restore_adapter(
    name: str,
    database: DatabaseDep,
    view: AdapterViewDep,
    limits: RegistryLimitsDep,
    identity: AdaptersWriteKey,
) -> AdapterAnswer:
    """Restore a deleted adapter, without the pin and the grants that it had."""

    def restore(conn: Connection) -> Adapter:
        refuse_name_of_route(conn, identity.tenant_id, name)
        adapter = view.catalog.restore_adapter(conn, identity.tenant_id, name, actor=identity.actor)
        _check_room(conn, name, limits, identity)
        return adapter

    return await _changed(database, view, restore)


# ---- versions ----


@router.get("/{name}/versions")
async def list_versions(
    name: str,
    database: DatabaseDep,
    view: AdapterViewDep,
    identity: AdaptersReadKey,
    before: Before = None,
    limit: Limit = 100,
    include_deleted: bool = False,
) -> VersionList:
    """List an adapter's versions, newest first.

    before: only versions below this number.   include_deleted: also versions that were deleted, or
    deleted and then purged.
    """

    def read(conn: Connection) -> VersionList:
        found = view.catalog.list_versions(
            conn,
            identity.tenant_id,
            name,
            before=before,
            limit=limit + 1,
            include_deleted=include_deleted,
        )
        # All versions are of one adapter; without versions there is nothing to price.
        adapter_id = found[0].adapter_id if found else ""
        price = price_of_adapter(conn, now_ms(), identity.tenant_id, adapter_id)
        data = [view.version(version, price) for version in found[:limit]]
        return VersionList(data=data, has_more=len(found) > limit)

    return await database.read(read)


@router.delete("/{name}/versions/{version}")
async def delete_version(
    name: str, version: int, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> VersionDeleted:
    """Delete a version that no alias points to; it can be restored for a time."""
    await database.write(
        lambda conn: catalog.delete_version(
            conn, identity.tenant_id, name, version, actor=identity.actor
        )
    )
    return VersionDeleted(id=name, version=version)


@router.post("/{name}/versions/{version}/restore")
async def restore_version(
    name: str,
    version: int,
    database: DatabaseDep,
    view: AdapterViewDep,
    limits: RegistryLimitsDep,
    identity: AdaptersWriteKey,
) -> VersionAnswer:
    """Restore a deleted version of an adapter."""

    def write(conn: Connection) -> VersionAnswer:
        restored = view.catalog.restore_version(
            conn, identity.tenant_id, name, version, actor=identity.actor
        )
        _check_room(conn, name, limits, identity)
        price = price_of_adapter(conn, now_ms(), identity.tenant_id, restored.adapter_id)
        return view.version(restored, price)

    return await database.write(write)


# ---- aliases ----


@dataclass(frozen=True, slots=True)
class _AliasOfCaller:
    """An alias of one of the caller's adapters, and what it takes to change it."""

    name: str
    alias: str
    database: DatabaseDep
    catalog: CatalogDep
    view: AdapterViewDep
    identity: AdaptersWriteKey

    async def change(self, change: Callable[..., Adapter], *to: object) -> AdapterAnswer:
        alias, actor = (self.identity.tenant_id, self.name, self.alias), self.identity.actor
        return await _changed(
            self.database, self.view, lambda conn: change(conn, *alias, *to, actor=actor)
        )


_AliasDep = Annotated[_AliasOfCaller, Depends()]


@router.put("/{name}/aliases/{alias}")
async def set_alias(of: _AliasDep, body: Annotated[_Alias, json_body(_Alias)]) -> AdapterAnswer:
    """Point an alias at a version, and some percent of its requests at a canary version."""
    canary = Canary(**body.canary.model_dump()) if body.canary else None
    return await of.change(of.catalog.set_alias, body.version, canary)


@router.post("/{name}/aliases/{alias}/rollback")
async def roll_back_alias(of: _AliasDep) -> AdapterAnswer:
    """Undo the last move of an alias; calling it again undoes that."""
    return await of.change(of.catalog.roll_back_alias)


@router.delete("/{name}/aliases/{alias}")
async def remove_alias(of: _AliasDep) -> AdapterAnswer:
    """Remove an alias; `latest` cannot be removed."""
    return await of.change(of.catalog.remove_alias)


@router.get("/{name}/aliases/{alias}/moves")
async def list_moves(
    name: str,
    alias: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    identity: AdaptersReadKey,
    before: Before = None,
    limit: Limit = 100,
) -> AliasMoveList:
    """List the moves of an alias, newest first.

    before: only moves before the one with this id.
    """
    found = await database.read(
        lambda conn: catalog.list_moves(
            conn, identity.tenant_id, name, alias, before=before, limit=limit + 1
        )
    )
    data = [move_view(move) for move in found[:limit]]
    return AliasMoveList(data=data, has_more=len(found) > limit)


async def _changed(
    database: Database, view: AdapterView, change: Callable[[Connection], Adapter]
) -> AdapterAnswer:
    """Make a change, and return the adapter as the change's own transaction sees it."""
    return await database.write(lambda conn: view.adapter(conn, change(conn)))
