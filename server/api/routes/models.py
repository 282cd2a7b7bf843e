"""The models a tenant may name: the base, its own adapters, and those shared with it."""

from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import Connection

from registry import grants
from server.accounts import tenants
from server.accounts.auth import Identity
from server.adapters.names import resolve_model
from server.api.answer import Answer
from server.api.deps import BaseDep, CatalogDep, DatabaseDep, InferenceKey
from server.inference.route import Route
from server.inference.routes import visible_routes
from server.inference.served_base import ServedBase

router = APIRouter()


class ModelAnswer(Answer):
    """A model that requests may name.

    created: in Unix seconds.   owned_by: the tenant's name.
    root, parent, max_model_len: vLLM's fields. The root is the name without version or alias, and
    the parent is the base model of an adapter.
    """

    id: str = Field(examples=["my-adapter@3"])
    object: Literal["model"] = "model"
    created: int = Field(examples=[1_798_761_600])
    owned_by: str = Field(examples=["acme"])
    root: str = Field(examples=["my-adapter"])
    parent: str | None = Field(examples=["base"])
    max_model_len: int | None = Field(examples=[32_768])


class ModelList(Answer):
    """All models that the key may name."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


@router.get("/models")
async def list_models(
    database: DatabaseDep, catalog: CatalogDep, base: BaseDep, identity: InferenceKey
) -> ModelList:
    """List the models that the key may name: the base, the tenant's adapters and shared ones, and
    routes.
    """

    def read(conn: Connection) -> list[ModelAnswer]:
        named = visible_routes(conn, identity.tenant_id)
        # A base model that was served later than the route was made has the name.
        named.pop(base.model_id, None)
        routes = [_route(route, identity) for route in named.values()]
        own = [
            _adapter(base, adapter.name, adapter.name, adapter.created_at_ms, identity.tenant_name)
            for adapter in catalog.list_adapters(conn, identity.tenant_id)
            if adapter.latest and catalog.is_servable(adapter.latest)
        ]
        shared = grants.list_shared(conn, identity.tenant_id, base.model.base_revision)
        names = tenants.names_of(conn, {adapter.owner_id for adapter in shared})
        return (
            own
            + [
                _adapter(base, model, model, adapter.created_at_ms, names[adapter.owner_id])
                for adapter in shared
                for model in (f"{names[adapter.owner_id]}/{adapter.name}",)
            ]
            + routes
        )

    adapters = await database.read(read)
    return ModelList(data=[_base(base), *adapters])


@router.get("/models/{model:path}")
async def get_model(
    model: str, database: DatabaseDep, catalog: CatalogDep, base: BaseDep, identity: InferenceKey
) -> ModelAnswer:
    """Get one model by the name that requests use for it."""

    def read(conn: Connection) -> ModelAnswer:
        route = visible_routes(conn, identity.tenant_id).get(model)
        if route and model != base.model_id:
            return _route(route, identity)
        named = resolve_model(conn, catalog, identity, model, request_key=model)
        if named is None:
            return _base(base)
        adapter = catalog.get_adapter(conn, named.owner_id, named.name)
        name = model.partition("@")[0]
        return _adapter(base, model, name, adapter.created_at_ms, named.owner_name)

    return await database.read(read)


def _base(base: ServedBase) -> ModelAnswer:
    created = base.model.created_at_s
    return _model(base, base.model_id, base.model_id, created, "chorale", None)


def _route(route: Route, identity: Identity) -> ModelAnswer:
    """A route's entry. Its models may be of several lengths, so the entry says none."""
    return ModelAnswer(
        id=route.name,
        created=route.created_at_ms // 1000,
        owned_by=identity.tenant_name if route.owner else "chorale",
        root=route.name,
        parent=None,
        max_model_len=None,
    )


def _adapter(
    base: ServedBase, model: str, name: str, created_at_ms: int, owner: str
) -> ModelAnswer:
    """An adapter's entry.   model: the name asked for.   name: without version or alias."""
    base_id = base.model_id
    return _model(base, model, name, created_at_ms // 1000, owner, base_id)


def _model(
    base: ServedBase, model: str, root: str, created: int, owner: str, parent: str | None
) -> ModelAnswer:
    return ModelAnswer(
        id=model,
        created=created,
        owned_by=owner,
        root=root,
        parent=parent,
        max_model_len=base.max_model_len or None,
    )
