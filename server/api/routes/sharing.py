"""Sharing and pins: which tenants may use an adapter, and whether it is kept on the device."""

from fastapi import APIRouter
from sqlalchemy import Connection

from registry import grants, pins
from registry.adapter_rows import Adapter, lock_tenant
from registry.catalog import Catalog
from registry.grants import Grant
from server.accounts import tenants
from server.accounts.auth import Identity
from server.accounts.tenants import Tenant
from server.api import errors
from server.api.adapter_view import pin_view
from server.api.deps import AdaptersReadKey, AdaptersWriteKey, CatalogDep, DatabaseDep
from server.billing.prices import price_for
from server.database.clock import now_ms
from server.text.json_object import JsonObject

router = APIRouter(prefix="/adapters/{name}")


@router.get("/grants")
async def list_grants(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersReadKey
) -> JsonObject:
    """List the tenants that an adapter is shared with."""

    def read(conn: Connection) -> list[JsonObject]:
        adapter = catalog.get_adapter(conn, identity.tenant_id, name)
        found = grants.list_grants(conn, adapter)
        names = tenants.names_of(conn, [grant.grantee_id for grant in found])
        return [_grant(name, names[grant.grantee_id], grant) for grant in found]

    data = await database.read(read)
    return {"object": "list", "data": data, "has_more": False}


@router.put("/grants/{tenant}")
async def grant(
    name: str, tenant: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> JsonObject:
    """Share an adapter with another tenant, given by name or id."""

    def write(conn: Connection) -> JsonObject:
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
) -> JsonObject:
    """Stop sharing an adapter with a tenant; this succeeds also if it was not shared."""

    def write(conn: Connection) -> Tenant:
        adapter = _locked(conn, catalog, identity, name)
        grantee = tenants.get_tenant(conn, tenant)
        grants.revoke(conn, adapter, grantee.tenant_id, actor=identity.actor, now_ms=now_ms())
        return grantee

    grantee = await database.write(write)
    return {
        "object": "adapter.grant.revoked",
        "adapter": name,
        "tenant": grantee.name,
        "tenant_id": grantee.tenant_id,
        "revoked": True,
    }


@router.put("/pin")
async def pin(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> JsonObject:
    """Keep the version that `latest` points to on the device, also when `latest` moves."""

    def write(conn: Connection) -> JsonObject:
        adapter = _locked(conn, catalog, identity, name)
        made = pins.pin_adapter(conn, adapter, actor=identity.actor, now_ms=now_ms())
        price = price_for(
            conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=adapter.adapter_id
        )
        return pin_view(made, price)

    return {"id": name, "object": "adapter.pin", **await database.write(write)}


@router.delete("/pin")
async def unpin(
    name: str, database: DatabaseDep, catalog: CatalogDep, identity: AdaptersWriteKey
) -> JsonObject:
    """Remove an adapter's pin; this succeeds also if it was not pinned."""

    def write(conn: Connection) -> None:
        adapter = _locked(conn, catalog, identity, name)
        pins.unpin_adapter(conn, adapter, actor=identity.actor, now_ms=now_ms())

    await database.write(write)
    return {"id": name, "object": "adapter.pin.removed", "removed": True}


def _locked(conn: Connection, catalog: Catalog, identity: Identity, name: str) -> Adapter:
    """The caller's own adapter, locked against changes until the transaction ends."""
    lock_tenant(conn, identity.tenant_id)
    return catalog.get_adapter(conn, identity.tenant_id, name)


def _grant(name: str, grantee_name: str, grant: Grant) -> JsonObject:
    return {
        "object": "adapter.grant",
        "adapter": name,
        "tenant": grantee_name,
        "tenant_id": grant.grantee_id,
        "granted_at": grant.granted_at_ms // 1000,
    }
