"""A tenant's adapters: list, show, versions, aliases, delete."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from registry.adapter_rows import Adapter, Version
from server.deps import AdaptersKey, GatewayDep
from server.gateway import Gateway

router = APIRouter(prefix="/adapters")

Limit = Annotated[int, Query(ge=1, le=1000)]


class _Alias(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int


@router.get("")
async def list_adapters(
    gateway: GatewayDep, identity: AdaptersKey, after: str | None = None, limit: Limit = 100
) -> dict[str, Any]:
    found = await gateway.database.read(
        lambda conn: gateway.catalog.list_adapters(
            conn, identity.tenant_id, after=after, limit=limit + 1
        )
    )
    data = [_adapter(gateway, adapter) for adapter in found[:limit]]
    return {"object": "list", "data": data, "has_more": len(found) > limit}


@router.get("/{name}")
async def get_adapter(name: str, gateway: GatewayDep, identity: AdaptersKey) -> dict[str, Any]:
    return _adapter(
        gateway,
        await gateway.database.read(
            lambda conn: gateway.catalog.get_adapter(conn, identity.tenant_id, name)
        ),
    )


@router.delete("/{name}")
async def delete_adapter(name: str, gateway: GatewayDep, identity: AdaptersKey) -> dict[str, Any]:
    await gateway.database.write(
        lambda conn: gateway.catalog.delete_adapter(conn, identity.tenant_id, name)
    )
    return {"id": name, "object": "adapter.deleted", "deleted": True}


@router.get("/{name}/versions")
async def list_versions(
    name: str,
    gateway: GatewayDep,
    identity: AdaptersKey,
    before: int | None = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    found = await gateway.database.read(
        lambda conn: gateway.catalog.list_versions(
            conn, identity.tenant_id, name, before=before, limit=limit + 1
        )
    )
    data = [render_version(gateway, version) for version in found[:limit]]
    return {"object": "list", "data": data, "has_more": len(found) > limit}


@router.put("/{name}/aliases/{alias}")
async def set_alias(
    name: str, alias: str, body: _Alias, gateway: GatewayDep, identity: AdaptersKey
) -> dict[str, Any]:
    adapter = await gateway.database.write(
        lambda conn: gateway.catalog.set_alias(conn, identity.tenant_id, name, alias, body.version)
    )
    return _adapter(gateway, adapter)


def _adapter(gateway: Gateway, adapter: Adapter) -> dict[str, Any]:
    latest = render_version(gateway, adapter.latest) if adapter.latest else None
    return {
        "id": adapter.name,
        "object": "adapter",
        "adapter_id": adapter.adapter_id,
        "created_at": adapter.created_at_ms // 1000,
        "aliases": adapter.aliases,
        "latest": latest,
    }


def render_version(gateway: Gateway, version: Version) -> dict[str, Any]:
    """A version as its tenant sees it. tier: where its weights are in the engine now."""
    residency = gateway.engines.residency(version.object_key)
    return {
        "version": version.version,
        "object": "adapter.version",
        "digest": version.digest,
        "base_revision": version.base_revision,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "state": version.state,
        "tier": residency.tier if residency else "remote",
        "is_servable": gateway.catalog.is_servable(version),
        "passport": version.passport,
        "created_at": version.created_at_ms // 1000,
    }
