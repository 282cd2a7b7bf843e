"""The models a tenant may name: the base, and its own adapters."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection

from server.deps import GatewayDep, InferenceKey
from server.gateway import Gateway

router = APIRouter()


@router.get("/models")
async def list_models(gateway: GatewayDep, identity: InferenceKey) -> dict[str, Any]:
    def read(conn: Connection) -> list[dict[str, Any]]:
        found = gateway.catalog.list_adapters(conn, identity.tenant_id)
        return [
            _model(gateway, adapter.name, adapter.created_at_ms, identity.tenant_name)
            for adapter in found
            if adapter.latest and gateway.catalog.is_servable(adapter.latest)
        ]

    adapters = await gateway.database.read(read)
    return {"object": "list", "data": [_base(gateway), *adapters]}


@router.get("/models/{model:path}")
async def get_model(model: str, gateway: GatewayDep, identity: InferenceKey) -> dict[str, Any]:
    if model == gateway.base.model_id:
        return _base(gateway)

    def read(conn: Connection) -> int:
        gateway.catalog.resolve(conn, identity.tenant_id, model)
        name = model.partition("@")[0]
        return gateway.catalog.get_adapter(conn, identity.tenant_id, name).created_at_ms

    return _model(gateway, model, await gateway.database.read(read), identity.tenant_name)


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
