"""Sharing and pins: which tenants may use an adapter, and whether it is kept on the device."""

from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import Connection

from registry import grants, pins
from registry.adapter_rows import Adapter, lock_tenant
from registry.catalog import Catalog
from registry.grants import Grant
from server.accounts import tenants
from server.accounts.auth import Identity
from server.accounts.tenants import Tenant
from server.api import errors
from server.api.adapter_view import PinAnswer, pin_view
from server.api.answer import Answer
from server.api.deps import AdaptersReadKey, AdaptersWriteKey, CatalogDep, DatabaseDep
from server.api.routes.lists import ListAnswer
from server.billing.prices import price_for
from server.database.clock import now_ms

router = APIRouter(prefix="/adapters/{name}")


class _Grant(Answer):
    adapter: str = Field(examples=["my-adapter"])
    tenant: str = Field(examples=["acme"])
    tenant_id: str = Field(examples=["ten_8c1f0a6b3e5d7942"])


class GrantAnswer(_Grant):
    """A grant: the tenant may use the adapter.   granted_at: in Unix seconds."""

    object: Literal["adapter.grant"] = "adapter.grant"
    granted_at: int = Field(examples=[1_798_761_600])


class GrantList(ListAnswer[GrantAnswer]):
    """All tenants that an adapter is shared with."""


class GrantRevoked(_Grant):
    """The answer to the end of a grant."""

    object: Literal["adapter.grant.revoked"] = "adapter.grant.revoked"
    revoked: Literal[True] = True


class AdapterPin(PinAnswer):
    """The answer to the pinning of an adapter."""

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter.pin"] = "adapter.pin"


class PinRemoved(Answer):
    """The answer to the removal of a pin."""

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter.pin.removed"] = "adapter.pin.removed"
    removed: Literal[True] = True


@router.get("/grants")
async def list_grants(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersReadKey
) -> GrantList:
    """List the tenants that an adapter is shared with."""

    def read(conn: Connection) -> GrantList:
        adapter = catalog.get_adapter(conn, identity.tenant_id, name)
        found = grants.list_grants(conn, adapter)
        names = tenants.names_of(conn, [grant.grantee_id for grant in found])
        return GrantList(data=[_grant(name, names[grant.grantee_id], grant) for grant in found])

    return await database.read(read)


@router.put("/grants/{tenant}")
async def grant(
    name: str, tenant: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> GrantAnswer:
    """Share an adapter with another tenant, given by name or id."""

    def write(conn: Connection) -> GrantAnswer:
        adapter = _locked(conn, catalog, identity, name)
        grantee = tenants.get_tenant(conn, tenant)
        if grantee.tenant_id == identity.tenant_id:
            raise errors.invalid_request(
                "An adapter cannot be shared with its owner.", param="tenant"
            )
        made = grants.grant(conn, adapter, grantee.tenant_id, actor=identity.actor, now_ms=now_ms())
        return _grant(name, grantee.name, made)

    return await database.write(write)


@router.delete("/grants/{tenant}")
async def revoke(
    name: str, tenant: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> GrantRevoked:
    """Stop sharing an adapter with a tenant; this succeeds also if it was not shared."""

    def write(conn: Connection) -> Tenant:
        adapter = _locked(conn, catalog, identity, name)
        grantee = tenants.get_tenant(conn, tenant)
        grants.revoke(conn, adapter, grantee.tenant_id, actor=identity.actor, now_ms=now_ms())
        return grantee

    grantee = await database.write(write)
    return GrantRevoked(adapter=name, tenant=grantee.name, tenant_id=grantee.tenant_id)


@router.put("/pin")
async def pin(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> AdapterPin:
    """Keep the version that `latest` points to on the device, also when `latest` moves."""

    def write(conn: Connection) -> AdapterPin:
        adapter = _locked(conn, catalog, identity, name)
        made = pins.pin_adapter(conn, adapter, actor=identity.actor, now_ms=now_ms())
        price = price_for(
            conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=adapter.adapter_id
        )
        return AdapterPin(id=name, **dict(pin_view(made, price)))

    return await database.write(write)


@router.delete("/pin")
async def unpin(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> PinRemoved:
    """Remove an adapter's pin; this succeeds also if it was not pinned."""

    def write(conn: Connection) -> None:
        adapter = _locked(conn, catalog, identity, name)
        pins.unpin_adapter(conn, adapter, actor=identity.actor, now_ms=now_ms())

    await database.write(write)
    return PinRemoved(id=name)


def _locked(conn: Connection, catalog: Catalog, identity: Identity, name: str) -> Adapter:
    """The caller's own adapter, locked against changes until the transaction ends."""
    lock_tenant(conn, identity.tenant_id)
    return catalog.get_adapter(conn, identity.tenant_id, name)


def _grant(name: str, grantee_name: str, grant: Grant) -> GrantAnswer:
    return GrantAnswer(
        adapter=name,
        tenant=grantee_name,
        tenant_id=grant.grantee_id,
        granted_at=grant.granted_at_ms // 1000,
    )
