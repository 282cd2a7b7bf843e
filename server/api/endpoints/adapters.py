"""A tenant's adapters: list and search, versions, aliases and their history, delete and restore."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Query
from pydantic import Field
from sqlalchemy import Connection

from registry.catalog.adapter_rows import Adapter, lock_tenant
from registry.catalog.alias_rows import Canary
from registry.uploads.rules import RegistryLimits, check_room, unfinished_uploads
from server.api.adapter_view import (
    AdapterAnswer,
    AdapterDeleted,
    AdapterList,
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
    DatabaseDep,
    RegistryLimitsDep,
    tenants_router,
)
from server.billing.prices import price_of_adapter
from server.database.clock import now_ms
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


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """The adapters of the caller's tenant, for a key that may look at them."""

    database: DatabaseDep
    view: AdapterViewDep
    identity: AdaptersReadKey

    def find(self, conn: Connection, name: str) -> Adapter:
        """The tenant's adapter of this name. Raises NotFound."""
        return self.view.catalog.get_adapter(conn, self.identity.tenant_id, name)


@dataclass(frozen=True, slots=True)
class AdapterWriter(AdapterReader):
    """The adapters of the caller's tenant, for a key that may change them."""

    identity: AdaptersWriteKey

    def lock(self, conn: Connection, name: str) -> Adapter:
        """Find an adapter, locked against changes until the transaction ends. Raises NotFound."""
        lock_tenant(conn, self.identity.tenant_id)
        return self.find(conn, name)

    async def change(self, change: Callable[..., Adapter], name: str, *of: object) -> AdapterAnswer:
        """Make a change, and return the adapter as the change's own transaction sees it.

        of: what `change` takes behind the adapter's name.
        """
        tenant_id, actor = self.identity.tenant_id, self.identity.actor
        return await self.database.write(
            lambda conn: self.view.adapter(conn, change(conn, tenant_id, name, *of, actor=actor))
        )

    def limits_of(self, limits: RegistryLimits) -> RegistryLimits:
        """The limits on what this tenant may store and upload, given the operator's."""
        names, identity = ("max_adapters", "max_adapter_bytes_total"), self.identity
        own = {name: getattr(identity, name) for name in names}
        return replace(limits, **{name: own[name] for name in names if own[name] is not None})

    def check_room(self, conn: Connection, name: str, limits: RegistryLimits) -> None:
        """Raise QuotaExceeded unless there is room for what was restored."""
        tenant_id = self.identity.tenant_id
        unfinished = unfinished_uploads(conn, tenant_id, now_ms())
        check_room(conn, tenant_id, name, self.limits_of(limits), unfinished)


ReaderDep = Annotated[AdapterReader, Depends()]
WriterDep = Annotated[AdapterWriter, Depends()]


# ---- adapters ----


@router.get("")
async def list_adapters(
    reader: ReaderDep, after: Search | None = None, limit: Limit = 100, search: Search = ""
) -> AdapterList:
    """List the tenant's adapters by name.

    after: only names after this one.   search: only names that contain this text.
    """

    def read(conn: Connection) -> AdapterList:
        found = reader.view.catalog.list_adapters(
            conn, reader.identity.tenant_id, after=after, search=search, limit=limit + 1
        )
        data = reader.view.adapters(conn, found[:limit])
        return AdapterList(data=data, has_more=len(found) > limit)

    return await reader.database.read(read)


@router.get("/{name}")
async def get_adapter(name: str, reader: ReaderDep) -> AdapterAnswer:
    """Get an adapter with its aliases, its pin and its latest version."""
    return await reader.database.read(
        lambda conn: reader.view.adapter(conn, reader.find(conn, name))
    )


@router.delete("/{name}")
async def delete_adapter(name: str, writer: WriterDep) -> AdapterDeleted:
    """Delete an adapter with its versions and aliases; it can be restored for a time."""
    identity, delete = writer.identity, writer.view.catalog.delete_adapter
    await writer.database.write(
        lambda conn: delete(conn, identity.tenant_id, name, actor=identity.actor)
    )
    return AdapterDeleted(id=name)


@router.post("/{name}/restore")
async def restore_adapter(name: str, writer: WriterDep, limits: RegistryLimitsDep) -> AdapterAnswer:
    """Restore a deleted adapter, without the pin and the grants that it had."""

    def restore(conn: Connection, tenant_id: str, name: str, *, actor: str) -> Adapter:
        refuse_name_of_route(conn, tenant_id, name)
        adapter = writer.view.catalog.restore_adapter(conn, tenant_id, name, actor=actor)
        writer.check_room(conn, name, limits)
        return adapter

    return await writer.change(restore, name)


# ---- versions ----


@router.get("/{name}/versions")
async def list_versions(
    name: str,
    reader: ReaderDep,
    before: Before = None,
    limit: Limit = 100,
    include_deleted: bool = False,
) -> VersionList:
    """List an adapter's versions, newest first.

    before: only versions below this number.   include_deleted: also versions that were deleted, or
    deleted and then purged.
    """
    tenant_id = reader.identity.tenant_id

    def read(conn: Connection) -> VersionList:
        found = reader.view.catalog.list_versions(
            conn, tenant_id, name, before=before, limit=limit + 1, include_deleted=include_deleted
        )
        # All versions are of one adapter; without versions there is nothing to price.
        adapter_id = found[0].adapter_id if found else ""
        price = price_of_adapter(conn, now_ms(), tenant_id, adapter_id)
        data = [reader.view.version(version, price) for version in found[:limit]]
        return VersionList(data=data, has_more=len(found) > limit)

    return await reader.database.read(read)


@router.delete("/{name}/versions/{version}")
async def delete_version(name: str, version: int, writer: WriterDep) -> VersionDeleted:
    """Delete a version that no alias points to; it can be restored for a time."""
    identity, delete = writer.identity, writer.view.catalog.delete_version
    await writer.database.write(
        lambda conn: delete(conn, identity.tenant_id, name, version, actor=identity.actor)
    )
    return VersionDeleted(id=name, version=version)


@router.post("/{name}/versions/{version}/restore")
async def restore_version(
    name: str, version: int, writer: WriterDep, limits: RegistryLimitsDep
) -> VersionAnswer:
    """Restore a deleted version of an adapter."""
    view, tenant_id, actor = writer.view, writer.identity.tenant_id, writer.identity.actor

    def write(conn: Connection) -> VersionAnswer:
        restored = view.catalog.restore_version(conn, tenant_id, name, version, actor=actor)
        writer.check_room(conn, name, limits)
        price = price_of_adapter(conn, now_ms(), tenant_id, restored.adapter_id)
        return view.version(restored, price)

    return await writer.database.write(write)


# ---- aliases ----


@router.put("/{name}/aliases/{alias}")
async def set_alias(
    name: str, alias: str, writer: WriterDep, body: Annotated[_Alias, json_body(_Alias)]
) -> AdapterAnswer:
    """Point an alias at a version, and some percent of its requests at a canary version."""
    canary = Canary(**body.canary.model_dump()) if body.canary else None
    return await writer.change(writer.view.catalog.set_alias, name, alias, body.version, canary)


@router.post("/{name}/aliases/{alias}/rollback")
async def roll_back_alias(name: str, alias: str, writer: WriterDep) -> AdapterAnswer:
    """Undo the last move of an alias; calling it again undoes that."""
    return await writer.change(writer.view.catalog.roll_back_alias, name, alias)


@router.delete("/{name}/aliases/{alias}")
async def remove_alias(name: str, alias: str, writer: WriterDep) -> AdapterAnswer:
    """Remove an alias; `latest` cannot be removed."""
    return await writer.change(writer.view.catalog.remove_alias, name, alias)


@router.get("/{name}/aliases/{alias}/moves")
async def list_moves(
    name: str, alias: str, reader: ReaderDep, before: Before = None, limit: Limit = 100
) -> AliasMoveList:
    """List the moves of an alias, newest first.

    before: only moves before the one with this id.
    """
    tenant_id, list_moves = reader.identity.tenant_id, reader.view.catalog.list_moves
    found = await reader.database.read(
        lambda conn: list_moves(conn, tenant_id, name, alias, before=before, limit=limit + 1)
    )
    data = [move_view(move) for move in found[:limit]]
    return AliasMoveList(data=data, has_more=len(found) > limit)
