"""The models a tenant may name: the base, its own adapters, and those shared with it."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection

from registry import grants
from server import tenants
from server.deps import GatewayDep, InferenceKey
from server.gateway import Gateway
from server.model_names import resolve_model

router = APIRouter()


@router.get("/models")
async def list_models(gateway: GatewayDep, identity: InferenceKey) -> dict[str, Any]:
    def read(conn: Connection) -> list[dict[str, Any]]:
        own = [
            _model(gateway, adapter.name, adapter.created_at_ms, identity.tenant_name)
            for adapter in gateway.catalog.list_adapters(conn, identity.tenant_id)
            if adapter.latest and gateway.catalog.is_servable(adapter.latest)
        ]
        shared = grants.list_shared(conn, identity.tenant_id, gateway.base.base_revision)
        names = tenants.names_of(conn, {adapter.owner_id for adapter in shared})
        return own + [
            _model(
                gateway,
                f"{names[adapter.owner_id]}/{adapter.name}",
                adapter.created_at_ms,
                names[adapter.owner_id],
            )
            for adapter in shared
        ]

    adapters = await gateway.database.read(read)
    return {"object": "list", "data": [_base(gateway), *adapters]}


@router.get("/models/{model:path}")
async def get_model(model: str, gateway: GatewayDep, identity: InferenceKey) -> dict[str, Any]:
    def read(conn: Connection) -> dict[str, Any]:
        named = resolve_model(conn, gateway.catalog, identity, model, request_key=model)
        if named is None:
            return _base(gateway)
        adapter = gateway.catalog.get_adapter(conn, named.owner_id, named.name)
        return _model(gateway, model, adapter.created_at_ms, named.owner_name)

    return await gateway.database.read(read)


def _base(gateway: Gateway) -> dict[str, Any]:
    return {"id": gateway.base.model_id, "object": "model", "created": 0, "owned_by": "chorale"}


def _model(gateway: Gateway, name: str, created_at_ms: int, owner: str) -> dict[str, Any]:
    """parent: the base model it changes (vLLM's field)."""
    return {
        "id": name,
        "object": "model",
        "created": created_at_ms // 1000,
        "owned_by": owner,
        "parent": gateway.base.model_id,
    }
