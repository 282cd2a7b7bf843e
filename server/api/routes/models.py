"""The models a tenant may name: the base, its own adapters, and those shared with it."""

from fastapi import APIRouter
from sqlalchemy import Connection

from registry import grants
from server.accounts import tenants
from server.adapters.names import resolve_model
from server.api.deps import BaseDep, CatalogDep, DatabaseDep, InferenceKey
from server.inference.served_base import ServedBase
from server.text.json_object import JsonObject

router = APIRouter()


@router.get("/models")
async def list_models(
    database: DatabaseDep, catalog: CatalogDep, base: BaseDep, identity: InferenceKey
) -> JsonObject:
    """List the models that the key may name: the base, the tenant's adapters and shared ones."""

    def read(conn: Connection) -> list[JsonObject]:
        own = [
            _adapter(base, adapter.name, adapter.name, adapter.created_at_ms, identity.tenant_name)
            for adapter in catalog.list_adapters(conn, identity.tenant_id)
            if adapter.latest and catalog.is_servable(adapter.latest)
        ]
        shared = grants.list_shared(conn, identity.tenant_id, base.model.base_revision)
        names = tenants.names_of(conn, {adapter.owner_id for adapter in shared})
        return own + [
            _adapter(base, model, model, adapter.created_at_ms, names[adapter.owner_id])
            for adapter in shared
            for model in (f"{names[adapter.owner_id]}/{adapter.name}",)
        ]

    adapters = await database.read(read)
    return {"object": "list", "data": [_base(base), *adapters]}


@router.get("/models/{model:path}")
async def get_model(
    model: str, database: DatabaseDep, catalog: CatalogDep, base: BaseDep, identity: InferenceKey
) -> JsonObject:
    """Get one model by the name that requests use for it."""

    def read(conn: Connection) -> JsonObject:
        named = resolve_model(conn, catalog, identity, model, request_key=model)
        if named is None:
            return _base(base)
        adapter = catalog.get_adapter(conn, named.owner_id, named.name)
        name = model.partition("@")[0]
        return _adapter(base, model, name, adapter.created_at_ms, named.owner_name)

    return await database.read(read)


def _base(base: ServedBase) -> JsonObject:
    created = base.model.created_at_s
    return _model(base, base.model_id, base.model_id, created, "chorale", None)


def _adapter(base: ServedBase, model: str, name: str, created_at_ms: int, owner: str) -> JsonObject:
    """An adapter's entry.   model: the name asked for.   name: without version or alias."""
    base_id = base.model_id
    return _model(base, model, name, created_at_ms // 1000, owner, base_id)


def _model(
    base: ServedBase, model: str, root: str, created: int, owner: str, parent: str | None
) -> JsonObject:
    """A model's entry. root, parent, max_model_len: vLLM's fields; parent is an adapter's base."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "root": root,
        "parent": parent,
        "max_model_len": base.max_model_len or None,
    }
